"""Show on a node when a run of its model begins, what the run merged, and errors. web/toma.js writes the messages on
the node, in the language of the page. Messages go only to the page that queued the prompt. Each names the prompt's
workflow, because nodes of two workflows may have the same id."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..toma_core.reasons import Message, MessageError, MessageId, json_of
from ..toma_core.stats import RunStats
from .adapters import report_text

Line = Message | str  # a message, or text that needs no translation, such as an empty line


class Status(MessageId):
    """The messages that a node shows about its inputs and runs. Comments name the parameters of a message."""

    OFF_RATIO = "off_ratio"
    OFF_STEPS = "off_steps"
    BY_PROFILE = "by_profile"
    ACTIVE = "active"
    MEASURING = "measuring"  # run, runs
    FAILED = "failed"  # error: a text in English


@dataclass(frozen=True)
class NodeStatus:
    """The status of one node during runs of its model."""

    node_id: str | None  # ComfyUI's id of the node in the prompt; None outside of a prompt, where nothing is shown
    notes: Sequence[Line] = ()  # remarks on the node's inputs, shown after each run
    # The values of the settings that the user left to the preset, by name; under "preset", the preset's name.
    preset: Mapping[str, Any] = field(default_factory=dict)

    def began(self) -> None:
        self.say(Status.ACTIVE())

    def ended(self, stats: RunStats) -> None:
        """Show what a run merged, or why it merged nothing."""
        lines = report_text.headline(stats), *report_text.work(stats), *self.notes
        # Whether the run's first step was full: web/timing.js needs this to correct the time per step.
        first_full = min(stats.steps, default=0) not in stats.merged_steps
        self.say(*lines, details=report_text.details(stats), run=True, first_full=first_full, preset=dict(self.preset))

    def measures(self, run: int, runs: int) -> None:
        """Show that run `run` of `runs` begins; the first is 1."""
        self.say(Status.MEASURING(run=run, runs=runs))

    def say(self, *lines: Line, details: Sequence[Line] = (), **more: Any) -> None:
        """Show lines on the node. details: for its tooltip; of an error, to unfold. more: further data for the page."""
        server, client, _ = _running()
        if client is not None and self.node_id is not None:  # without a client ComfyUI would send to every client
            with suppress(RuntimeError):  # raised while the server shuts down
                server.send_sync("toma.said", {"node": self.node_id, **_message(lines, details), **more}, client)


@contextmanager
def status_of(hidden: Any) -> Iterator[NodeStatus]:
    """Yield the status of a node with these hidden inputs. Errors inside `with` are shown on the node and re-raised."""
    status = NodeStatus(None if hidden is None else hidden.unique_id)
    try:
        yield status
    except MessageError as error:
        status.say(error.message, details=error.details, error=True)
        raise
    except Exception as error:
        status.say(Status.FAILED(error=str(error) or type(error).__name__), error=True)
        raise


def said(lines: Sequence[Line], details: Sequence[Line] = ()) -> dict[str, Any]:
    """Return an entry of a node's `ui` output that shows lines and details on the node."""
    return {"toma": (_message(lines, details),)}


def _message(lines: Sequence[Line], details: Sequence[Line]) -> dict[str, Any]:
    """Return lines and details as data for the page, and as English text for other clients."""
    text, details_text = ("\n".join(map(str, part)) for part in (lines, details))
    shown, more = (list(map(json_of, part)) for part in (lines, details))
    _, _, graph = _running()
    return {"graph": graph, "text": text, "details": details_text, "lines": shown, "more": more}


def _running() -> tuple[Any, str | None, str | None]:
    """Return ComfyUI's server, the id of the client that queued the running prompt, and the id of the prompt's
    workflow. A missing id is None. All three are None without a server or a running prompt, or if ComfyUI's queue has
    an unknown form."""
    try:
        server = sys.modules["server"].PromptServer.instance  # missing where ComfyUI runs without a server
        (prompt,) = server.prompt_queue.get_current_queue_volatile()[0]
        extra = prompt[3]
        workflow = (extra.get("extra_pnginfo") or {}).get("workflow") or {}
        return server, extra.get("client_id"), workflow.get("id")
    except (AttributeError, LookupError, TypeError, ValueError):
        return None, None, None
