"""A damaged file of the demo gives an error that names the file, or it can still be used.

TOMA_FUZZ sets the number of files, see conftest.py. `make fuzz` sets a higher number than other commands.
"""

from __future__ import annotations

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


def damaged(data: bytes, seed: int) -> tuple[str, bytes]:
    """Return a kind of damage, and the data of a safetensors file with this damage: truncated, or with flipped bits."""
    chance = random.Random(seed)  # noqa: S311 - cases, no secrets
    header = 8 + int.from_bytes(data[:8], "little")
    ways = {"length": (0, 8), "header": (8, header), "numbers": (header, len(data)), "anywhere": (0, len(data))}
    ends = {"cut": chance.randrange(len(data)), "cut in the header": chance.randrange(header), "empty": 0}
    way = [*ends, *ways][seed % 7]
    if way in ends:
        return f"{way} at {ends[way]}", data[: ends[way]]
    changed = bytearray(data)
    for _ in range(chance.randint(1, 40)):
        changed[chance.randrange(*ways[way])] ^= 1 << chance.randrange(8)
    return way, bytes(changed)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "checker.safetensors": checker.load_checker,
    "deep.safetensors": lambda path: demo_nodes.ToMADemoUNet.execute("trained", 0),
}


@pytest.mark.parametrize("name", LOADERS)
def test_damaged_demo_weights_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any) -> None:
    path = tmp_path / name
    monkeypatch.setattr(demo_nodes, "UNET_WEIGHTS", path)
    original = WEIGHTS_FOLDER / name
    # If the demo has no trained weights, use the checker's file, whose header is about as long.
    intact = (original if original.exists() else WEIGHTS_FOLDER / "checker.safetensors").read_bytes()
    refused = 0
    for seed in range(max(14, CASES // 10)):
        way, data = damaged(intact, seed)
        path.write_bytes(data)
        try:
            LOADERS[name](path)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert name in message, way
            assert "again" in message, way
        else:
            assert way in ("numbers", "anywhere", "header"), way
    assert refused >= 4
