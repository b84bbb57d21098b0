from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from demo import compact


def test_large_matrices_take_a_quarter_with_a_small_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-3, 0, 64)[:, None]  # factors of rows from 0.001 to 1
    weights = {
        "matrix": spread * torch.randn(64, 128, generator=generator),
        "kernel": torch.randn(32, 16, 3, 3, generator=generator),
        "nothing": torch.zeros(64, 64),
        "bias": torch.randn(64, generator=generator),
    }
    save_file(weights, tmp_path / "a.safetensors", metadata={"step": "7"})
    monkeypatch.setattr(sys, "argv", ["compact", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])
    compact.main()
    size = (tmp_path / "b.safetensors").stat().st_size
    assert size < 0.35 * (tmp_path / "a.safetensors").stat().st_size
    found = compact.load_weights(tmp_path / "b.safetensors")
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in weights.items()}
    for name in ("matrix", "kernel"):
        error = (found[name] - weights[name]).flatten(1).norm(dim=1) / weights[name].flatten(1).norm(dim=1)
        assert 0 < error.max() < 0.02, "in every row"
    assert torch.equal(found["nothing"], weights["nothing"])
    assert torch.equal(compact.unpacked(compact.packed(found))["matrix"], found["matrix"]), "rounded once"


def test_a_file_that_is_not_packed_is_read_as_it_is(tmp_path: Path) -> None:
    weights = {"a": torch.randn(80, 80).half()}
    save_file(weights, tmp_path / "a.safetensors")
    assert torch.equal(compact.load_weights(tmp_path / "a.safetensors")["a"], weights["a"])
