"""Test `benchmarks.hosttime`, which measures the time that a call takes on the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.comfyui import ROOT


def test_it_runs(tmp_path: Path) -> None:
    """Run the benchmark in a separate process, because in this process kernels run in Triton's interpreter."""
    pytest.importorskip("triton.backends.nvidia.compiler")
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.hosttime", "--repeats", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "hosttime.json").read_text())
    assert list(result["rows"]) == ["Triton", "PyTorch"]
    parts = ["merge", "restore", "propagate", "propagate, regressed", "propagate keys, regressed", "plan"]
    for rows in result["rows"].values():
        assert list(rows) == parts
        assert all(0.5 < adds < 5000 for adds in rows.values())
    assert json.loads(done.stdout) == result
