"""What a node shows of its runs while the page is open: one message when a run begins, one when it ends, and what went
wrong in between.

web/toma.js puts the text on the node, in the page's language. The messages go to the page that queued the prompt and to
no other; they say in which workflow the node is, because two of them may use the same node ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..toma_core.stats import RunStats

_EVENT = "toma.said"
_ACTIVE = "Sampling on fewer tokens ..."


@dataclass(frozen=True)
class NodeLine:
    """Tells one node of the runs of its model. node_id: ComfyUI's id of the node in the prompt. note: what stays to be
    said of its inputs, on lines of its own."""

    node_id: str
    note: str = ""

    def began(self) -> None:
        """A run begins."""
        self.say(_ACTIVE)

    def ended(self, stats: RunStats) -> None:
        """A run is over: what was merged, or why nothing was."""
        self.say(f"{stats.headline()}\n{self.note}".strip(), stats.numbers())

    def measures(self, run: int, runs: int) -> None:
        """One of several runs begins, counted from 1."""
        self.say(f"Measuring: run {run} of {runs} ...")

    def say(self, text: str, details: str = "", *, error: bool = False) -> None:
        """A sentence for the node, and what its tooltip adds."""
        message = {"node": self.node_id, **_message(text, details)}
        _send({**message, "error": True} if error else message)


def line_of(hidden: Any) -> NodeLine | None:
    """The line of the node that is executed, from its hidden inputs; None where it is executed outside of a prompt."""
    node_id = None if hidden is None else hidden.unique_id
    return None if node_id is None else NodeLine(str(node_id))


@contextmanager
def errors_shown(line: NodeLine | None) -> Iterator[None]:
    """An error in here stands on the node itself too, beside what ComfyUI makes of it."""
    try:
        yield
    except Exception as error:
        if line is not None:
            line.say(str(error) or type(error).__name__, error=True)
        raise


def said(text: str, details: str = "") -> dict[str, Any]:
    """A text as part of a node's own `ui`, for what is known when the node is executed."""
    return {"toma": (_message(text, details),)}


def _message(text: str, details: str) -> dict[str, Any]:
    return {"graph": _running()[1], "text": text, "details": details}


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
