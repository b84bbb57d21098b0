from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks import bench, breakeven
from scripts.comfy_pack import pack_module


def test_rows_are_merged_and_say_what_auto_does(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(sides: list[int]) -> list[str]:
        rows = breakeven.measure(64, 1, sides, 0.5, 1, torch.float32, torch.device("cpu"))
        assert bench.red(rows) == []
        assert [row.tokens for row in rows] == [f"{side**2} -> {side**2 // 2}" for side in sides]
        assert all(row.speedup for row in rows)
        return [row.note for row in rows]

    assert notes([4, 16]) == [
        "Auto does not merge it (fewer than 256 tokens, too few to gain (min tokens in ToMA Advanced))",
        "Auto merges it",
    ]
    cost_model = pack_module("toma_core.cost_model")
    monkeypatch.setattr(cost_model, "card_of", lambda device: cost_model.Card("NVIDIA H100", (9, 0), 132))
    assert notes([16]) == [
        "Auto does not merge it (too little work to gain on this device (min tokens in ToMA Advanced))"
    ]
