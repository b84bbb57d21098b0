"""A damaged file gives an error that names the file, or it can still be used. The server neither hangs nor ends.

TOMA_FUZZ sets the number of files, see conftest.py. `make fuzz` sets a higher number than other commands.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo import checker
from demo import nodes as demo_nodes
from demo.showcase_graphs import DIT, WEIGHTS_FOLDER, sampling_graph
from scripts.comfy_server import ComfyServer

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


def test_damaged_checkpoint_is_refused_in_words_or_runs(steady: ComfyServer, outcome: Any) -> None:
    intact = (steady.base / "models" / "diffusion_models" / "toma_demo_dit.safetensors").read_bytes()
    seen = set()
    for seed in range(max(7, CASES // 40)):
        way, data = damaged(intact, seed)
        path = steady.base / "models" / "diffusion_models" / f"damaged{seed}.safetensors"
        path.write_bytes(data)
        graph = sampling_graph(DIT, 64, 1, seed=seed, merged=True, full_step_interval=0, similarity_from="tokens")
        graph["loader"]["inputs"]["unet_name"] = path.name
        how = outcome(steady, graph)
        path.unlink()
        seen.add(how)
        assert how in ("success", "error in UNETLoader"), (way, how)
    assert "error in UNETLoader" in seen


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
        begin = time.monotonic()
        try:
            LOADERS[name](path)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert name in message, way
            assert "again" in message, way
        else:
            assert way in ("numbers", "anywhere", "header"), way
        assert time.monotonic() - begin < 60
    assert refused >= 4
