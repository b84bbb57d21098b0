"""A real headless ComfyUI server with this pack linked in.

with ComfyServer() as server:
    run = server.run(prompt)               # prompt in ComfyUI's API format
    png = server.view(run.outputs["9"]["images"][0])
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from scripts.comfy_client import ComfyClient, ServerError
from scripts.comfyui import ROOT

PACK_FOLDER = "ComfyUI-ToMA"
BASE_FOLDERS = ("custom_nodes", "input", "models", "output", "temp", "user")
LOG_TAIL = 4000
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ComfyServer(ComfyClient):
    """Context manager around a server process. Every exit kills the process group.

    Attributes:
        base: base directory with models/, input/, output/ and so on. Files may be put there before `start`.
        process: the running process, None before `start` and after `stop`.
    """

    def __init__(
        self,
        *,
        comfyui: Path | None = None,
        packs: Sequence[Path] = (),
        checkout: bool = True,
        base: Path | None = None,
        port: int | None = None,
        flags: Sequence[str] = (),
        cpu: bool | None = None,
        environ: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        """Prepare the base directory.

        Args:
            comfyui: folder of ComfyUI, `COMFYUI_PATH` if None.
            packs: folders of other custom nodes to link in.
            checkout: whether to link this checkout in. Use False to test an installed pack.
            base: base directory, which is not removed. None: a temporary one, which `stop` removes.
            port: port to listen on; any free one if it is None or in use.
            flags: command line flags of ComfyUI to add.
            cpu: run on the CPU. None: only if torch finds no CUDA device.
            environ: environment variables in addition to the current ones.
            start_timeout: seconds until the server must respond.
        """
        super().__init__(free_port(port))
        self._comfyui = Path(comfyui or os.environ["COMFYUI_PATH"]).absolute()
        self._flags = [*flags, *(["--cpu"] if (not _has_cuda() if cpu is None else cpu) else [])]
        self._environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})}
        self._start_timeout = start_timeout
        self._log = ""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if base is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="toma-", ignore_cleanup_errors=True)
            base = Path(self._temporary.name)
        self.base = base.absolute()
        self.process: subprocess.Popen[bytes] | None = None
        for name in BASE_FOLDERS:
            (self.base / name).mkdir(parents=True, exist_ok=True)
        own = [(ROOT, PACK_FOLDER)] if checkout else []
        for folder, name in [*own, *((pack.absolute(), pack.name) for pack in packs)]:
            link = self.base / "custom_nodes" / name
            link.unlink(missing_ok=True)
            link.symlink_to(folder)

    def __enter__(self) -> ComfyServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> ComfyServer:
        """Start the server and return once it responds. Raises ServerError if the server does not respond."""
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                cwd=self._comfyui,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill the server's process group and remove a temporary base directory. A second call is harmless."""
        process = self.process
        if process is not None:
            _kill_group(process)
            self._log = self.log()
            self.process = None
        if self._temporary is not None:
            self._temporary.cleanup()

    def log(self) -> str:
        """Return the server's output so far, without colours. This also works after `stop`."""
        if self.process is None:
            return self._log
        return COLOUR.sub("", self._log_path.read_text(encoding="utf-8", errors="replace"))

    def log_tail(self) -> str:
        return f"\n{self.log()[-LOG_TAIL:]}"

    def check_alive(self) -> None:
        if self.process is None:
            raise ServerError("the server is not running")
        code = self.process.poll()
        if code is not None:
            raise ServerError(f"ComfyUI ended with exit code {code}{self.log_tail()}")

    @property
    def _log_path(self) -> Path:
        return self.base / "server.log"

    def _command(self) -> list[str]:
        command = [sys.executable, str(self._comfyui / "main.py"), "--port", str(self.port)]
        command += ["--base-directory", str(self.base)]
        # Keep the database in a file. ComfyUI 0.16 would open a new in-memory database in each thread, without tables.
        command += ["--database-url", f"sqlite:///{self.base / 'user' / 'comfyui.db'}"]
        command += ["--disable-api-nodes", "--disable-auto-launch", "--dont-print-server", *self._flags]
        # The server ends with this process, even if the process is killed and no `finally` runs.
        return ["setpriv", "--pdeathsig", "KILL", *command] if shutil.which("setpriv") else command

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        while True:
            self.check_alive()
            try:
                self.fetch("/system_stats", timeout=5.0)
            except OSError:
                if time.monotonic() > deadline:
                    text = f"ComfyUI did not answer in {self._start_timeout:.0f} s{self.log_tail()}"
                    raise ServerError(text) from None
                time.sleep(0.2)
            else:
                return


def free_port(wanted: int | None = None) -> int:
    """Return the given port if it is free on this machine, otherwise any free port."""
    for port in (wanted or 0, 0):
        with socket.socket() as probe, suppress(OSError):
            if os.name == "posix":  # ignore lingering connections of an earlier server, as ComfyUI does
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise ServerError("this machine has no free port")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _kill_group(process: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """Terminate the process group, then kill it, together with children that outlived their parent."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
