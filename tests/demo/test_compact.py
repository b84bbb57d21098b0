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
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(weights, source)
    assert torch.equal(compact.load_weights(source)["matrix"], weights["matrix"]), "a file that is not packed"
    monkeypatch.setattr(sys, "argv", ["compact", str(source), str(target)])
    compact.main()
    assert target.stat().st_size < 0.35 * source.stat().st_size
    found = compact.load_weights(target)
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in weights.items()}
    for name in ("matrix", "kernel"):
        error = (found[name] - weights[name]).flatten(1).norm(dim=1) / weights[name].flatten(1).norm(dim=1)
        assert 0 < error.max() < 0.02, "in every row"
    assert torch.equal(found["nothing"], weights["nothing"])
    assert torch.equal(compact.unpacked(compact.packed(found))["matrix"], found["matrix"]), "rounded once"
