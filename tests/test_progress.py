"""A run of tests says what it is doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.comfyui import ROOT

SLOW = """
import time, pytest
from tests.progress import Progress

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config, 0.5), "progress")
"""
TESTS = "import time\n\ndef test_slow():\n    time.sleep(2)\n\ndef test_quick():\n    pass\n"


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(SLOW)
    (folder / "test_two.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *options,
        str(folder),
    ]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=env).stdout


def test_lines_of_one_process_and_of_two(tmp_path: Path) -> None:
    for options, processes in (((), 1), (("-n", "2"), 2)):
        shown = run(tmp_path, *options)
        assert f"2 tests, processes: {processes}; a line follows every 0.5 s" in shown
        assert "of 2 tests done; for " in shown
        assert "test_two.py::test_slow" in shown
        assert "2 passed" in shown
