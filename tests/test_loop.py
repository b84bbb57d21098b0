"""A loop in one test tries every value and names those that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.comfyui import ROOT

PROGRAM = """
import os
import pytest
from tests.loop import loop

@loop("a", [1, 2, 3])
@loop(("b", "c"), [(1, "x"), (2, "y")])
def test_some(a, b, c, tmp_path):
    print("tried", a, b, c)
    if a == 1:
        pytest.skip("not this one")
    assert (a, b) != (2, 2)

@loop("a", [1, 2])
def test_patches(a, monkeypatch):
    assert "LOOP" not in os.environ
    monkeypatch.setenv("LOOP", "1")
"""


def test_every_value_is_tried_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-s", "-c", os.devnull, "-p", "no:cacheprovider", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(re.findall(r"tried \d", done.stdout)) == 6
    failed = [line for line in done.stdout.splitlines() if line.startswith("SUBFAILED")]
    assert [line for line in failed if "b='2'" in line and "c='y'" in line], done.stdout
    assert not [line for line in failed if "test_patches" in line], done.stdout
