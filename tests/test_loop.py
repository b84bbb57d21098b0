"""A loop in one test tries every value and names those that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.comfyui import ROOT

PROGRAM = """
import logging
import os
import pytest
from tests.loop import loop

ROUNDS = []

@loop("a", [1, 2, 3])
@loop(("b", "c"), [(1, "x"), (2, "y")])
def test_some(a, b, c, tmp_path):
    print("tried", a, b, c)
    if a == 1:
        pytest.skip("not this one")
    assert (a, b) != (2, 2)

@loop("a", [1, 2])
def test_patches(a, monkeypatch, tmp_path, caplog):
    assert "LOOP" not in os.environ
    monkeypatch.setenv("LOOP", "1")
    (tmp_path / "file").touch(exist_ok=False)
    logging.warning("once")
    assert len(caplog.records) == 1

@pytest.fixture
def kept():
    values = []
    yield values
    print("ended", values)

@pytest.fixture
def twice(kept, a):
    kept.append(a)
    return 2 * a

@loop("a", [1, 2])
@pytest.mark.parametrize("b", [5])
def test_fixtures(a, b, twice, kept):
    assert (twice, kept, b) == (2 * a, [a], 5)

@pytest.fixture(autouse=True)
def counted():
    ROUNDS.append(0)
    yield
    ROUNDS[-1] += 1

@loop("a", [1, 2])
def test_only_the_fixture_asks(twice):
    assert ROUNDS == [*[1] * (len(ROUNDS) - 1), 0]
    assert twice in (2, 4)
"""


def test_every_value_is_tried_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.loop",
        str(tmp_path),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(re.findall(r"tried \d", done.stdout)) == 6
    failed = [line for line in done.stdout.splitlines() if line.startswith("SUBFAILED")]
    assert [line for line in failed if "b='2'" in line and "c='y'" in line], done.stdout
    assert not [line for line in failed if "test_some" not in line], done.stdout
    assert len(re.findall(r"ended \[\d\]", done.stdout)) == 4, done.stdout
