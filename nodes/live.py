"""What a node shows of its runs while the page is open: one message when a run begins, one when it ends.

web/toma.js puts the text on the node. The messages go to the page that queued the prompt and to no other; they say in
which workflow the node is, because two of them may use the same node ids.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..toma_core.stats import RunStats

_EVENT = "toma.said"
_ACTIVE = "sampling on fewer tokens ..."


@dataclass(frozen=True)
class NodeLine:
    """Tells one node of the runs of its model. node_id: ComfyUI's id of the node in the prompt."""

    node_id: str

    def began(self) -> None:
        """A run begins."""
        _send(self.node_id, _ACTIVE)

    def ended(self, stats: RunStats) -> None:
        """A run is over: what was merged, or why nothing was."""
        _send(self.node_id, stats.headline())


def said(text: str) -> dict[str, Any]:
    """A text as part of a node's own `ui`, for what is known when the node is executed."""
    return {"toma": ({"graph": _running()[1], "text": text},)}


def _send(node_id: str, text: str) -> None:
    client, graph = _running()
    if client is None:  # nobody looks; without a client ComfyUI would tell everybody
        return
    with suppress(RuntimeError):  # the server is on its way out
        _server().send_sync(_EVENT, {"node": node_id, "graph": graph, "text": text}, client)


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
