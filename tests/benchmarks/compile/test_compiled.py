"""Test the torch.compile benchmark, with a backend that runs graphs unchanged."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import compiled


def test_both_orders_are_merged(pack: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "DEPTHS", (0, 1, 1))
    monkeypatch.setattr(compiled, "MIDDLE", 1)
    command = ["compiled", "--model", "sdxl", "--repeats", "1", "--backend", "eager", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    torch._dynamo.reset()
    compiled.main()
    torch._dynamo.reset()
    rows = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert [row["variant"].count("ToMA") for row in rows] == [0, 1, 0, 1, 1]
    assert [row["variant"].count("torch.compile") for row in rows] == [0, 0, 1, 1, 1]
    assert all(row["speedup"] for row in rows)
    assert [row["tokens"] for row in rows if "ToMA" in row["variant"]] == ["256 -> 128, 64 -> 32"] * 3
