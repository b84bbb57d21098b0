"""Test that a damaged weights file of the demo raises an error with the file's name, or loads.

TOMA_FUZZ sets the number of files, see conftest.py. `make fuzz` sets a higher number than other commands.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo import checker
from demo import nodes as demo_nodes
from demo.showcase_graphs import WEIGHTS_FOLDER

CASES = int(os.environ["TOMA_FUZZ"])
LOADERS: dict[str, Callable[[Path], Any]] = {
    "checker.safetensors": checker.load_checker,
    "deep.safetensors": lambda path: demo_nodes.ToMADemoUNet.execute("trained", 0),
}


@pytest.mark.parametrize("name", LOADERS)
def test_damaged_demo_weights_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any) -> None:
    """The file is cut, or some of its bits are flipped. A cut file must raise the error."""
    path = tmp_path / name
    monkeypatch.setattr(demo_nodes, "UNET_WEIGHTS", path)
    original = WEIGHTS_FOLDER / name
    # If the demo has no trained weights, damage the checker's weights instead, whose header is about as long.
    data = (original if original.exists() else WEIGHTS_FOLDER / "checker.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    parts = {"length": (0, 8), "header": (8, header), "numbers": (header, len(data)), "anywhere": (0, len(data))}
    ways = [*((part, True) for part in (*parts, "empty")), *((part, False) for part in parts)]
    refused = 0
    for seed in range(max(14, CASES // 10)):
        chance, (part, cut) = random.Random(seed), ways[seed % len(ways)]  # noqa: S311 - cases, no secrets
        damaged = bytearray(data)
        if cut:
            damaged = damaged[: chance.randrange(*parts.get(part, (0, 1)))]
        for _ in range(0 if cut else chance.randint(1, 40)):
            damaged[chance.randrange(*parts[part])] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            LOADERS[name](path)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert name in message
            assert "again" in message
        else:
            assert not cut, part
            assert part != "length"
    assert refused >= 4
