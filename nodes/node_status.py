"""What a node shows of its runs while the page is open: one message when a run begins, one when it ends, and what went
wrong in between.

web/toma.js puts it on the node, in the page's language. The messages go to the page that queued the prompt and to
no other; they say in which workflow the node is, because two of them may use the same node ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..toma_core.reasons import Message, MessageError, MessageId
from ..toma_core.stats import RunStats

_EVENT = "toma.said"

# A line of text: a message, or what needs no translation, as an empty line.
Line = Message | str


class Status(MessageId):
    """What a node says of runs."""

    ACTIVE = "active"
    MEASURING = "measuring"  # run, runs
    FAILED = "failed"  # error: in English


@dataclass(frozen=True)
class NodeStatus:
    """The status of one node during runs of its model.

    Attributes:
        node_id: ComfyUI's id of the node in the prompt.
        notes: Lines on its inputs, shown after each run.
        preset: Values of the settings that are left to the preset, by name.
    """

    node_id: str
    notes: Sequence[Line] = ()
    preset: Mapping[str, Any] = field(default_factory=dict)

    def began(self) -> None:
        """A run begins."""
        self.say(Status.ACTIVE())

    def ended(self, stats: RunStats) -> None:
        """A run is over: what was merged, or why nothing was."""
        lines = stats.headline(), *stats.work(), *self.notes
        # The page times the sampler that ends now, see web/timing.js.
        self.say(*lines, details=stats.details(), run=True, preset=dict(self.preset))

    def measures(self, run: int, runs: int) -> None:
        """One of several runs begins, counted from 1."""
        self.say(Status.MEASURING(run=run, runs=runs))

    def say(self, *lines: Line, details: Sequence[Line] = (), **more: Any) -> None:
        """Show lines on the node, and details in its tooltip. more: what else the page is sent."""
        _send({"node": self.node_id, **_message(lines, details), **more})


def status_of(hidden: Any) -> NodeStatus | None:
    """The line of the node that is executed, from its hidden inputs; None where it is executed outside of a prompt."""
    node_id = None if hidden is None else hidden.unique_id
    return None if node_id is None else NodeStatus(str(node_id))


@contextmanager
def errors_shown(line: NodeStatus | None) -> Iterator[None]:
    """Show an error in here on the node itself, too."""
    try:
        yield
    except Exception as error:
        if line is not None:
            failed = Status.FAILED(error=str(error) or type(error).__name__)
            line.say(error.message if isinstance(error, MessageError) else failed, error=True)
        raise


def said(lines: Sequence[Line], details: Sequence[Line] = ()) -> dict[str, Any]:
    """Return lines as part of a node's own `ui`, for what is known when the node is executed."""
    return {"toma": (_message(lines, details),)}


def _message(lines: Sequence[Line], details: Sequence[Line]) -> dict[str, Any]:
    """text, details: in English, for whoever reads them without the page. lines, more: the same for the page."""
    return {
        "graph": _running()[1],
        "text": "\n".join(map(str, lines)),
        "details": "\n".join(map(str, details)),
        "lines": [_json(line) for line in lines],
        "more": [_json(line) for line in details],
    }


def _json(line: Line) -> Any:
    return line if isinstance(line, str) else line.json()


def _send(message: dict[str, Any]) -> None:
    client, _ = _running()
    if client is None:  # nobody looks; without a client ComfyUI would tell everybody
        return
    with suppress(RuntimeError):  # the server is on its way out
        _server().send_sync(_EVENT, message, client)


def _running() -> tuple[str | None, str | None]:
    """The client whose prompt is running, and the id of the workflow on its page; None where there is none, or where
    another ComfyUI keeps its queue in another way: what is shown of a run must never end it."""
    try:
        (prompt,) = _server().prompt_queue.get_current_queue_volatile()[0]
        extra = prompt[3]
        workflow = (extra.get("extra_pnginfo") or {}).get("workflow") or {}
        return extra.get("client_id"), workflow.get("id")
    except (AttributeError, IndexError, TypeError, ValueError):
        return None, None


def _server() -> Any:
    """ComfyUI's server, None where its classes are used without one."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
