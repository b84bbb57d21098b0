"""Drive a ComfyUI server over its own HTTP API and websocket."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OnMessage = Callable[[str, Any], None]
POLL_SECONDS = 0.1


class ServerError(RuntimeError):
    """The server did not start, or it has ended. The message ends with the server's log."""


class PromptError(RuntimeError):
    """The server refused a prompt, and did not run it (HTTP 400).

    Attributes:
        error: the error of the prompt itself.
        node_errors: node id -> {"errors": [{"type", "message", "details", "extra_info"}], ...}.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(json.dumps(body, indent=1))
        self.error: dict[str, Any] = body.get("error") or {}
        self.node_errors: dict[str, Any] = body.get("node_errors") or {}


@dataclass(frozen=True)
class Run:
    """One finished prompt.

    Attributes:
        status: "success", "error" or "interrupted".
        outputs: node id -> the output that the node showed, e.g. {"images": [...]}, {"text": [...]}.
        messages: (type, data) in order of arrival: over the websocket for `ComfyClient.run`, from the history for
        `ComfyClient.wait`. Binary previews are ("binary", bytes).
        error: data of the `execution_error` message (node_id, node_type, exception_message, traceback, ...) or None.
        seconds: from the queueing in `run`, or from the call of `wait`, to the end.
    """

    prompt_id: str
    status: str
    outputs: dict[str, Any]
    messages: list[tuple[str, Any]]
    error: dict[str, Any] | None
    seconds: float


class ComfyClient:
    """A client of the server at `http://127.0.0.1:<port>`."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def queue(self, prompt: Mapping[str, Any], client_id: str | None = None) -> str:
        """Queue a prompt (API format) and return its id at once. Raises PromptError if the prompt is not valid."""
        body = {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex}
        try:
            return str(self.post("/prompt", body)["prompt_id"])
        except urllib.error.HTTPError as error:
            if error.code == 400:
                raise PromptError(json.loads(error.read())) from None
            raise

    def wait(self, prompt_id: str, timeout: float = 300.0) -> Run:
        """Wait for a queued prompt by polling the history. Raises TimeoutError, ServerError."""
        start = time.monotonic()
        while (run := self._finished(prompt_id, time.monotonic() - start)) is None:
            self.check_alive()
            if time.monotonic() - start > timeout:
                raise TimeoutError(f"prompt {prompt_id} did not end in {timeout:.0f} s{self.log_tail()}")
            time.sleep(POLL_SECONDS)
        return run

    def run(self, prompt: Mapping[str, Any], timeout: float = 300.0, on_message: OnMessage | None = None) -> Run:
        """Queue a prompt, follow it over the websocket and return the finished run, even if it failed (`Run.status`).

        `on_message(type, data)` gets every websocket message on arrival. Raises PromptError, ServerError, and
        TimeoutError after interrupting the prompt.
        """
        try:
            return asyncio.run(asyncio.wait_for(self._follow(prompt, on_message), timeout))
        except asyncio.TimeoutError:
            self.interrupt()
            raise TimeoutError(f"the prompt did not end in {timeout:.0f} s{self.log_tail()}") from None

    def interrupt(self) -> None:
        """Interrupt the running prompt."""
        self.post("/interrupt", {})

    def object_info(self, node_id: str) -> dict[str, Any]:
        """Return the definition of a node. Raises KeyError if the server lacks the node."""
        return dict(self.get(f"/object_info/{urllib.parse.quote(node_id)}")[node_id])

    def view(self, image: Mapping[str, str]) -> bytes:
        """Download the file of one entry of an output's `images`."""
        return self.fetch("/view?" + urllib.parse.urlencode(image))

    def settings(self) -> dict[str, Any]:
        """Return the settings of the web page that differ from its defaults."""
        return dict(self.get("/settings"))

    def set_setting(self, name: str, value: object) -> None:
        """Change one setting of the web page, e.g. `Comfy.TutorialCompleted`."""
        self.post(f"/settings/{urllib.parse.quote(name)}", value)

    def get(self, path: str) -> Any:
        """GET a path and parse the JSON. Raises urllib.error.HTTPError."""
        return json.loads(self.fetch(path))

    def post(self, path: str, body: object) -> Any:
        """POST JSON to a path and parse the response, None if it is empty. Raises urllib.error.HTTPError."""
        answer = self.fetch(path, json.dumps(body).encode())
        return json.loads(answer) if answer else None

    def fetch(self, path: str, data: bytes | None = None, timeout: float = 60.0) -> bytes:
        """Return the raw response to GET (POST if there is data). Raises urllib.error.HTTPError."""
        headers = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)  # noqa: S310 - always http
        with _opener.open(request, timeout=timeout) as response:
            return bytes(response.read())

    def check_alive(self) -> None:
        """Raise ServerError if the server has ended. `wait` and `run` call this method repeatedly."""

    def log_tail(self) -> str:
        """Return the end of the server's log for an error message, empty if there is no log."""
        return ""

    async def _follow(self, prompt: Mapping[str, Any], on_message: OnMessage | None) -> Run:
        import aiohttp  # comes with ComfyUI; only this method needs it

        client_id = uuid.uuid4().hex
        messages: list[tuple[str, Any]] = []
        start = time.monotonic()
        address = f"{self.url}/ws?clientId={client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as websocket:
            prompt_id = self.queue(prompt, client_id)
            async for message in websocket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    kind, data = "binary", message.data
                else:
                    event = json.loads(message.data)
                    kind, data = event["type"], event.get("data")
                messages.append((kind, data))
                if on_message is not None:
                    on_message(kind, data)
                if kind == "executing" and data["node"] is None and data.get("prompt_id") == prompt_id:
                    break
        self.check_alive()
        run = self._finished(prompt_id, time.monotonic() - start, messages)
        if run is None:
            raise ServerError(f"the websocket closed before the prompt ended{self.log_tail()}")
        return run

    def _finished(self, prompt_id: str, seconds: float, messages: list[tuple[str, Any]] | None = None) -> Run | None:
        """Return the run from the history, None if the history does not list it yet."""
        entry = self.get(f"/history/{prompt_id}").get(prompt_id)
        if entry is None:
            return None
        past = [(kind, data) for kind, data in entry["status"]["messages"]]
        last_of_kind = dict(past)
        error = last_of_kind.get("execution_error")
        status = "error" if error else "interrupted" if "execution_interrupted" in last_of_kind else "success"
        return Run(prompt_id, status, entry["outputs"], past if messages is None else messages, error, seconds)


# Requests never go through a proxy, because the server is on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
