"""A client of a running ComfyUI whose errors have readable messages."""

from __future__ import annotations

import contextlib
import http.client
import io
import time
import urllib.error
import urllib.parse
from dataclasses import dataclass
from typing import Any

from PIL import Image

from scripts.comfy_client import ComfyClient, PromptError, Run

from . import BenchmarkError
from .graphs import Graph

AGAIN = "Run the same command again to go on: the pictures made so far are kept."
CHECK_QUEUE_SECONDS = 3.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Made:
    """A picture (PNG), the server's seconds of its run, and the ids of nodes whose results were cached; None for an old
    server that does not send them."""

    png: bytes
    seconds: float | None
    cached: list[str] | None


class Server(ComfyClient):
    """A client of the ComfyUI at an address such as `http://127.0.0.1:8188`; `http://` may be left out."""

    def __init__(self, url: str) -> None:
        full = url if "://" in url else f"http://{url}"
        try:
            port = urllib.parse.urlsplit(full).port or 80
        except ValueError:
            raise BenchmarkError(f"--server {url} is not an address; an example: http://127.0.0.1:8188") from None
        super().__init__(port)
        self._url = full.rstrip("/")

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

    def widgets(self, node: str) -> dict[str, Any]:
        """Return the server's description of a node's inputs: name -> [type or choices, options]."""
        try:
            described = self.object_info(node)["input"]
        except KeyError:
            raise BenchmarkError(
                f"the ComfyUI at {self.url} has no node {node}: put ComfyUI-ToMA into its custom_nodes folder, start "
                "it again, and look for errors in its log"
            ) from None
        return {**described.get("required", {}), **described.get("optional", {})}

    def make(self, graph: Graph, picture: str) -> Made:
        """Queue a graph, wait for it, and return the picture of one node. Ctrl-C removes it from the queue."""
        return self._made(self._run(graph), picture)

    def outputs(self, graph: Graph) -> dict[str, Any]:
        """Queue a graph, wait for it, and return the nodes' outputs: id -> kind -> values. Ctrl-C as above."""
        return self._run(graph).outputs

    def _run(self, graph: Graph) -> Run:
        try:
            prompt_id = self.queue(graph)
        except PromptError as error:
            raise BenchmarkError(self._refusal(error, graph)) from None
        except urllib.error.HTTPError as error:
            raise BenchmarkError(f"{self.url} answered {error.code} {error.reason} to a prompt; see its log") from None
        try:
            run = self._follow_to_the_end(prompt_id)
        except KeyboardInterrupt:
            self._drop(prompt_id)
            raise
        if run.error is not None:
            where = f"{run.error.get('node_type')} (node {run.error.get('node_id')})"
            text = str(run.error.get("exception_message", "")).strip()
            raise BenchmarkError(f"ComfyUI failed in {where}: {text}\nIts log has the details. {AGAIN}")
        if run.status != "success":
            raise BenchmarkError(f"the run was interrupted on the server. {AGAIN}")
        return run

    def _made(self, run: Run, picture: str) -> Made:
        images = run.outputs.get(picture, {}).get("images", [])
        if len(images) != 1:
            raise BenchmarkError(f"node {picture} gave {len(images)} pictures in one run; set the batch size to 1")
        try:
            png = self.view(images[0])
            with Image.open(io.BytesIO(png)) as opened:
                opened.load()
        except (urllib.error.HTTPError, OSError) as error:
            raise BenchmarkError(f"the server could not hand over a picture it made ({error}). {AGAIN}") from None
        messages = dict(run.messages)
        start, end = (messages.get(f"execution_{kind}", {}).get("timestamp") for kind in ("start", "success"))
        seconds = (end - start) / 1000 if start is not None and end is not None else None
        return Made(png, seconds, messages.get("execution_cached", {}).get("nodes"))

    def _follow_to_the_end(self, prompt_id: str) -> Run:
        """Wait without a time limit; other prompts may be before it in the queue."""
        start = time.monotonic()
        checked, missed = start, False
        while (run := self._finished(prompt_id, time.monotonic() - start)) is None:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - checked < CHECK_QUEUE_SECONDS:
                continue
            checked = time.monotonic()
            # Missing twice in a row: a prompt may be in neither queue nor history for a moment.
            gone = not self._is_queued(prompt_id)
            if gone and missed:
                raise BenchmarkError(
                    f"the server has lost the run: was its queue cleared, or ComfyUI restarted? {AGAIN}"
                )
            missed = gone
        return run

    def _is_queued(self, prompt_id: str) -> bool:
        queue = self.get("/queue")
        return any(entry[1] == prompt_id for part in queue.values() for entry in part)

    def _drop(self, prompt_id: str) -> None:
        """Interrupt or remove this prompt and no other."""
        with contextlib.suppress(BenchmarkError, urllib.error.HTTPError):
            self.post("/queue", {"delete": [prompt_id]})
            if self._is_queued(prompt_id):
                self.post("/interrupt", {"prompt_id": prompt_id})

    def _refusal(self, error: PromptError, graph: Graph) -> str:
        lines = [f"ComfyUI refused the graph: {error.error.get('message', 'it is not valid')}"]
        for name, found in error.node_errors.items():
            kind = found.get("class_type", graph.get(name, {}).get("class_type", "?"))
            for one in found.get("errors", []):
                lines.append(f"  {kind} (node {name}): {one.get('message')}: {self._details(kind, one)}")
        if len(lines) == 1:
            lines.append(f"  {error.error.get('details', '')}")
        return "\n".join(lines)

    def _details(self, kind: str, error: dict[str, Any]) -> str:
        if error.get("type") != "value_not_in_list":
            return str(error.get("details", ""))
        extra = error.get("extra_info", {})
        choices = _choices(self.widgets(kind).get(extra.get("input_name"), []))
        listed = ", ".join(map(str, choices)) if choices else "nothing: its folder on the server is empty"
        return f"{extra.get('input_name')} = {extra.get('received_value')!r}; the server has {listed}"


def _choices(widget: list[Any]) -> list[Any]:
    """Return the choices of a combo box, in the old and the new description."""
    if widget and isinstance(widget[0], list):
        return list(widget[0])
    return list(widget[1].get("options", [])) if len(widget) > 1 else []
