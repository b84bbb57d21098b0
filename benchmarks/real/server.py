"""A client of a running ComfyUI. It raises errors with readable messages."""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
from dataclasses import dataclass
from typing import Any

from scripts.comfy_client import ComfyClient, PromptError, Run

from . import BenchmarkError
from .graphs import Graph

AGAIN = "Run the same command again to go on: the pictures made so far are kept."
LONGEST = 3600.0  # longest wait for a picture in seconds, including the pictures before it in the queue


@dataclass(frozen=True)
class Made:
    """A picture (PNG), the seconds of its run (None if the server does not report them), and the ids of nodes whose
    results were cached."""

    png: bytes
    seconds: float | None
    cached: list[str]


class Server(ComfyClient):
    """A client of the ComfyUI at an address such as `http://127.0.0.1:8188`."""

    def __init__(self, url: str) -> None:
        super().__init__(0)
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def fetch(self, path: str, data: bytes | None = None, timeout: float = 60.0) -> bytes:
        try:
            return super().fetch(path, data, timeout)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise BenchmarkError(f"{self.url} does not answer ({reason}). Is ComfyUI running there? {AGAIN}") from None

    def conditions(self) -> dict[str, str]:
        """Return the conditions of times and pictures: ComfyUI, PyTorch and device."""
        try:
            stats = self.get("/system_stats")
            system = stats["system"]
            found = {name: str(system.get(f"{name}_version", "unknown")) for name in ("comfyui", "pytorch")}
            return {**found, "device": str(stats["devices"][0]["name"])}
        except (urllib.error.HTTPError, ValueError, KeyError, IndexError, TypeError):
            raise BenchmarkError(f"{self.url} answers, but not as ComfyUI does; check --server") from None

    def default(self, node: str, name: str) -> Any:
        """Return the default of an input of a node, None if the input has no default."""
        try:
            described = self.object_info(node)["input"]
        except KeyError:
            raise BenchmarkError(
                f"the ComfyUI at {self.url} has no node {node}: put ComfyUI-ToMA into its custom_nodes folder, start "
                "it again, and look for errors in its log"
            ) from None
        options = {**described.get("required", {}), **described.get("optional", {})}.get(name, [None])[-1]
        return options.get("default") if isinstance(options, dict) else None

    def make(self, graph: Graph, picture: str) -> Made:
        """Queue a graph, wait for it, and return the picture of one node. Ctrl-C removes the graph from the queue."""
        run = self._run(graph)
        images = run.outputs.get(picture, {}).get("images", [])
        if len(images) != 1:
            raise BenchmarkError(f"node {picture} gave {len(images)} pictures in one run; set the batch size to 1")
        messages = dict(run.messages)
        start, end = (messages.get(f"execution_{kind}", {}).get("timestamp") for kind in ("start", "success"))
        seconds = (end - start) / 1000 if start is not None and end is not None else None
        return Made(self.view(images[0]), seconds, messages.get("execution_cached", {}).get("nodes", []))

    def _run(self, graph: Graph) -> Run:
        try:
            prompt_id = self.queue(graph)
        except PromptError as error:
            raise BenchmarkError(_refusal(error)) from None
        try:
            run = self.wait(prompt_id, LONGEST)
        except KeyboardInterrupt:
            self._drop(prompt_id)
            raise
        except TimeoutError:
            raise BenchmarkError(f"no picture in {LONGEST:.0f} s: was the server's queue cleared? {AGAIN}") from None
        if run.error is not None:
            where = f"{run.error.get('node_type')} (node {run.error.get('node_id')})"
            text = str(run.error.get("exception_message", "")).strip()
            raise BenchmarkError(f"ComfyUI failed in {where}: {text}\nIts log has the details. {AGAIN}")
        if run.status != "success":
            raise BenchmarkError(f"the run was interrupted on the server. {AGAIN}")
        return run

    def _drop(self, prompt_id: str) -> None:
        """Interrupt or remove this prompt and no other."""
        with contextlib.suppress(BenchmarkError, urllib.error.HTTPError):
            self.post("/queue", {"delete": [prompt_id]})
            self.post("/interrupt", {"prompt_id": prompt_id})


def _refusal(error: PromptError) -> str:
    """Return the message for a graph that the server refused, with a line for each input."""
    lines = [f"ComfyUI refused the graph: {error.error.get('message', 'it is not valid')}"]
    for name, found in error.node_errors.items():
        for one in found.get("errors", []):
            where = f"{found.get('class_type')} (node {name})"
            lines.append(f"  {where}: {one.get('message')}: {one.get('details')}")
    return "\n".join(lines)
