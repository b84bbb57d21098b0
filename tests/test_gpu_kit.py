"""Test the GPU kit: CUDA libraries that are cut to one architecture, and visit.sh, which runs on the GPU machine."""

import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts import fatbin, gpu_kit
from scripts.comfyui import ROOT
from scripts.console import SetupError


def entry(kind: int, sm: int, code: bytes) -> bytes:
    """Return an entry of a CUDA library: a header of 64 bytes with the architecture at byte 28, then code."""
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", sm)
    return head.ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_one_architecture_stays_where_it_was() -> None:
    ours, theirs = entry(2, 90, b"hopper--"), entry(2, 80, b"ampere--" * 4)
    text = entry(1, 90, b"ptx of 90, which is no machine code")
    rest = b"between" + container(ours) + b"\x50\xed\x55\xba, no header"
    library = b"ELF" + container(theirs, ours, text) + rest
    cut = fatbin.one_architecture(library, 90)
    expected = library[:11] + struct.pack("<Q", len(ours)) + ours
    assert cut == expected.ljust(len(library) - len(rest), b"\0") + rest
    with pytest.raises(SetupError, match="sm_120"):
        fatbin.one_architecture(library, 120)
    with pytest.raises(SetupError, match="something else"):
        fatbin.one_architecture(container(bytes(64)), 90)


PRETENDS = """#!/usr/bin/env bash
while [ "$1" != --out ]; do shift; done
cat "$COMFYUI_PATH/main.py"
touch "$2/results.json"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the script is for Linux")
def test_a_visit_finds_a_kit_and_results_of_visits_before_it(tmp_path: Path) -> None:
    """visit.sh unpacks a new kit beside earlier kits, and keeps the results of earlier visits."""
    tree, out, temporary, python = (tmp_path / name for name in ("a tree", "the out", "its tmp", "a python"))
    for folder in (tree / ".gpu", out, temporary):
        folder.mkdir(parents=True)
    python.write_text(PRETENDS)
    python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "PYTHON": str(python), "TMPDIR": str(temporary), "OUT": str(out), "DRY": "1"}

    def visit() -> int:
        command = ["bash", str(ROOT / "benchmarks" / "gpu" / "visit.sh")]
        return subprocess.run(command, cwd=tree, env=environ, capture_output=True, timeout=600, check=False).returncode

    assert visit() == 9
    for number in range(3):
        (tmp_path / "main.py").write_text(f"kit {min(number, 1)}")
        with tarfile.open(tree / ".gpu" / gpu_kit.ARCHIVE, "w:gz") as tar:
            tar.add(tmp_path / "main.py", "ComfyUI/main.py")
        if number:
            (out / "results.json").write_text(f"before {number}")
        assert visit() == 0
        newest = max(out.rglob("log.txt"), key=lambda path: path.stat().st_mtime_ns).read_text()
        assert f"kit {min(number, 1)}" in newest
        assert "### exit 0" in newest
        assert newest.rstrip().endswith("results.json")
    assert (out / "results.json").read_text() == "before 2"
