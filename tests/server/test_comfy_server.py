"""Test `scripts.comfy_server`, which runs a real server: success, failure and shutdown."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts.comfy_client import ServerError
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from tests.processes import wait_for_end

NODES = '''
import time
import comfy.model_management

class Slow:
    """Takes its time, and can be interrupted; fails with negative seconds."""
    INPUT_TYPES = classmethod(lambda cls: {"required": {"seconds": ("FLOAT", {"default": 0.0, "min": -1.0})}})
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "work", True, "test"

    def work(self, seconds):
        if seconds < 0:
            raise ValueError(f"cannot do {seconds}")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.02)
        return {"ui": {"text": [str(seconds)]}}

NODE_CLASS_MAPPINGS = {"TestSlow": Slow}
'''


def prompt(seconds: float) -> dict:
    return {"1": {"class_type": "TestSlow", "inputs": {"seconds": seconds}}}


def test_a_server_from_its_start_to_its_end(tmp_path: Path) -> None:
    base, pack = tmp_path / "base", tmp_path / "slow-pack"
    base.mkdir()
    pack.mkdir()
    (pack / "__init__.py").write_text(NODES)
    with ComfyServer(packs=[pack], base=base) as server:
        run = server.run(prompt(-0.25))
        assert run.status == "error"
        assert run.error is not None
        assert run.error["node_type"] == "TestSlow"
        assert run.error["exception_message"].strip() == "cannot do -0.25"
        # Interrupt only when the node runs, because ComfyUI forgets an interrupt that comes earlier.
        run = server.run(prompt(100.0), on_message=lambda kind, _: kind == "executing" and server.interrupt())
        assert (run.status, run.outputs) == ("interrupted", {})
        assert server.wait(run.prompt_id).status == "interrupted"
        with pytest.raises(TimeoutError, match=r"did not end in 1 s"):
            server.run(prompt(101.0), timeout=1)
        seen = []
        run = server.run(prompt(0.02), on_message=lambda kind, _: seen.append(kind))
        assert run.outputs == {"1": {"text": ["0.02"]}}
        assert seen == [kind for kind, _ in run.messages]
        assert seen[-1] == "executing"
        server.set_setting("Comfy.TutorialCompleted", True)
        assert server.settings()["Comfy.TutorialCompleted"] is True
        process = server.process
    server.stop()
    assert process is not None
    assert process.returncode is not None
    assert "ValueError: cannot do -0.25" in server.log()
    assert (base / "server.log").is_file()
    with pytest.raises(ServerError, match="not running"):
        server.check_alive()


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
        assert psutil.pid_exists(int(pid))
        parent.send_signal(signal.SIGKILL)
    wait_for_end(int(pid))
    shutil.rmtree(base.strip())
