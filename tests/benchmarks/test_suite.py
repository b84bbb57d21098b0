"""Test the suite's sections: they are selected by name, and stopped with their child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import suite
from scripts.comfyui import ROOT

STARTS_ANOTHER = """
import os, subprocess, sys, time
os.setpgid(0, 0)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_a_section_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    assert "stopped" in suite._run([sys.executable, "-c", STARTS_ANOTHER, str(pid_file)], dict(os.environ), 3)
    pid, deadline = int(pid_file.read_text()), time.monotonic() + 5
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_section_that_is_not_there_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.suite", "--only", "sdlx", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "sdxl" in done.stderr
    assert not list(tmp_path.iterdir())
