"""The driver of the real server, in success, failure and shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.comfy_client import ServerError
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

NODES = '''
import time
import comfy.model_management

class Slow:
    """Takes its time, and can be interrupted."""
    INPUT_TYPES = classmethod(lambda cls: {"required": {"seconds": ("FLOAT", {"default": 0.0})}})
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "work", True, "test"

    def work(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.02)
        return {"ui": {"text": [str(seconds)]}}

class Broken(Slow):
    """Fails while it runs."""
    def work(self, seconds):
        raise ValueError(f"cannot do {seconds}")

NODE_CLASS_MAPPINGS = {"TestSlow": Slow, "TestBroken": Broken}
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def slow_server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Run a server with a second pack, in a given base directory."""
    pack = tmp_path_factory.mktemp("packs") / "slow-pack"
    pack.mkdir()
    (pack / "__init__.py").write_text(NODES)
    with ComfyServer(packs=[pack], base=base) as running:
        yield running


def prompt(node_id: str, seconds: float) -> dict:
    return {"1": {"class_type": node_id, "inputs": {"seconds": seconds}}}


def test_error_in_a_node_is_reported_and_the_queue_goes_on(slow_server: ComfyServer) -> None:
    run = slow_server.run(prompt("TestBroken", 0.25))
    assert run.status == "error"
    assert run.error is not None
    assert run.error["node_type"] == "TestBroken"
    assert run.error["exception_message"].strip() == "cannot do 0.25"
    assert "execution_error" in {kind for kind, _ in run.messages}
    assert slow_server.run(prompt("TestSlow", 0.0)).outputs == {"1": {"text": ["0.0"]}}


def test_interrupted_prompt_says_so(slow_server: ComfyServer) -> None:
    prompt_id = slow_server.queue(prompt("TestSlow", 100.0))
    while not slow_server.get("/queue")["queue_running"]:
        time.sleep(0.05)
    slow_server.interrupt()
    run = slow_server.wait(prompt_id)
    assert run.status == "interrupted"
    assert run.outputs == {}


def test_prompt_that_takes_too_long_is_stopped(slow_server: ComfyServer) -> None:
    with pytest.raises(TimeoutError, match=r"did not end in 1 s"):
        slow_server.run(prompt("TestSlow", 101.0), timeout=1)
    assert slow_server.run(prompt("TestSlow", 0.01)).status == "success"


def test_messages_are_seen_as_they_come(slow_server: ComfyServer) -> None:
    seen = []
    run = slow_server.run(prompt("TestSlow", 0.02), on_message=lambda kind, _: seen.append(kind))
    assert seen == [kind for kind, _ in run.messages]
    assert seen[-1] == "executing"


def test_settings_are_stored(slow_server: ComfyServer) -> None:
    slow_server.set_setting("Comfy.TutorialCompleted", True)
    assert slow_server.settings()["Comfy.TutorialCompleted"] is True


def test_stop_ends_the_process_and_keeps_what_is_not_its_own(base: Path, slow_server: ComfyServer) -> None:
    process = slow_server.process
    assert process is not None
    slow_server.stop()
    slow_server.stop()
    assert process.returncode is not None
    assert "ValueError: cannot do 0.25" in slow_server.log()
    assert (base / "server.log").is_file()
    with pytest.raises(ServerError, match="not running"):
        slow_server.check_alive()


def test_server_that_cannot_start_shows_its_log() -> None:
    server = ComfyServer(flags=["--no-such-flag"])
    with pytest.raises(ServerError, match=r"ended with exit code 2[\s\S]*unrecognized arguments: --no-such-flag"):
        server.start()
    assert not server.base.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the server only on Linux")
def test_server_does_not_outlive_a_killed_parent() -> None:
    program = (
        "import time; from scripts.comfy_server import ComfyServer; server = ComfyServer(); server.start(); "
        "print(server.process.pid, server.base, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, base = parent.stdout.readline().split(maxsplit=1)
        assert is_running(int(pid))
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid))
    subprocess.run(["rm", "-rf", base.strip()], check=True)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
