"""Test two real processes that sample together. Either both merge correctly, or neither merges.

compatibility/parallel.py reimplements how raylight and xDiT share tokens and conditions among processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.comfyui import ROOT
from tests.loop import loop

RANK = Path(__file__).with_name("rank.py")
TOKENS_CHANGED = "tokens_changed"
WAYS = ("raylight", "xdit")
KINDS = ("0-references", "1-references", "2-references", "odd", "module", "detail")
BLOCKS = {"flux": 6, "unet": 17}

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="PyTorch without gloo"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Return the results of every case of rank.py for each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    logs = [folder / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, str(RANK), str(rank), str(folder)]
            ranks.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
    try:
        ended = [process.wait(timeout=500) for process in ranks]
    except subprocess.TimeoutExpired:
        ended = [-1, -1]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ended == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check(found: Any, name: str, merged: int, unmerged: set[str], off: float = 1e-5) -> None:
    """Check the pictures of both processes. off: the largest allowed difference from a picture that one process samples
    without ToMA."""
    for process in found:
        case = process[name]
        assert case["the same on all"]
        assert case["as ToMA on one process"] is bool(merged)
        assert case["as without ToMA"] is not bool(merged)
        assert case["merged"] == merged
        assert set(case["unmerged"]) <= unmerged
        assert case["off from one process"] < off, "not the model that it should be"


@loop("way", WAYS)
@loop("kind", KINDS)
def test_shared_tokens_are_not_merged(found: Any, way: str, kind: str) -> None:
    """Each process has a part of the token sequence. With references this part has more tokens than the image.
    Nevertheless, merging it by the image's grid would be wrong."""
    name = f"tokens-{way}-{kind}"
    # Double blocks, whose `forward` raylight replaces, have the reason `block_replaced`. In the case `odd`, tokens also
    # attend to padding, which changes the picture.
    check(found, name, 0, {TOKENS_CHANGED, "block_replaced"}, 0.05 if kind == "odd" else 1e-5)
    for process in found:
        assert sum(process[name]["unmerged"].values()) == BLOCKS["flux"]
        assert process[name]["off from one process"] > 0


@loop("model", ["flux", "unet"])
@loop("granularity", ["stack", "module"])
def test_shared_conditions_are_not_merged(found: Any, model: str, granularity: str) -> None:
    """Each process evaluates one of two conditions, and ToMA cannot know which of the two."""
    name = f"conditions-{model}-{granularity}"
    check(found, name, 0, {TOKENS_CHANGED})
    assert all(process[name]["unmerged"] for process in found)


@loop("model", ["flux", "unet"])
@loop("spread", ["pictures", "weights"])
def test_complete_pictures_are_merged_as_on_one_process(found: Any, model: str, spread: str) -> None:
    """Each process samples a complete picture, with its own copy of the weights or with sharded weights (FSDP)."""
    check(found, f"{spread}-{model}", BLOCKS[model], set())
    assert all(process[f"{spread}-{model}"]["off from one process"] == 0 for process in found)
