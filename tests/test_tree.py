"""The tracked tree and the GPU kit are within the 64 MiB that a lent machine accepts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from scripts.comfyui import ROOT

MB = 1_000_000
TREE_MB, WITHOUT_WEIGHTS_MB = 45, 12
WEIGHTS = ".safetensors"


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Return the size in bytes of each tracked file in the checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git tells which files are tracked, and it is not here")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {name: ROOT / name for name in listed.split("\0") if name}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def largest(sizes: dict[str, int]) -> str:
    """Return the ten largest files, for the failure's message."""
    rows = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    return "\n".join(f"{size / MB:7.2f} MB  {name}" for name, size in rows)


def test_the_tracked_tree_is_light(sizes: dict[str, int]) -> None:
    total = sum(sizes.values()) / MB
    assert 1 < total <= TREE_MB, f"{total:.1f} MB are tracked, at most {TREE_MB} may be:\n{largest(sizes)}"


def test_all_but_weights_is_lighter_still(sizes: dict[str, int]) -> None:
    rest = {name: size for name, size in sizes.items() if not name.endswith(WEIGHTS)}
    total = sum(rest.values()) / MB
    assert total <= WITHOUT_WEIGHTS_MB, f"{total:.1f} MB beside weights, at most {WITHOUT_WEIGHTS_MB}:\n{largest(rest)}"
