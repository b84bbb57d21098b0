"""Test that a deep UNet is initialised with the weights of the trained shallow one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo import deepen, models

NAME = "stack.transformer_blocks"


def test_every_block_is_there_in_smaller_steps() -> None:
    shallow = {f"{NAME}.{n}.ff.net.2.weight": torch.full((2,), n + 1.0) for n in range(2)}
    shallow |= {f"{NAME}.{n}.norm1.weight": torch.full((2,), 10.0 + n) for n in range(2)}
    shallow["conv.weight"] = torch.full((2,), 7.0)
    names = [f"{NAME}.{n}.{part}" for n in range(5) for part in ("ff.net.2.weight", "norm1.weight")]
    deep = deepen.deepened(shallow, [*names, "conv.weight"])
    outputs = [deep[f"{NAME}.{n}.ff.net.2.weight"][0].item() for n in range(5)]
    assert outputs == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 1]), "together what they were"
    assert [deep[f"{NAME}.{n}.norm1.weight"][0].item() for n in range(5)] == [10, 10, 10, 11, 11]
    assert torch.equal(deep["conv.weight"], shallow["conv.weight"])
    assert deepen.depths(deep) == {NAME: 5}


def test_a_deepened_file_predicts_nearly_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    network = models.new_unet(0, to_train=False)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.endswith(deepen._OUTPUTS) and "transformer_blocks" in name:
                value.mul_(0.1)  # small residuals, as in a trained stack
    save_file(network.state_dict(), tmp_path / "a.safetensors")
    monkeypatch.setattr(sys, "argv", ["deepen", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])
    deepen.main()
    deep = models.new_unet(config=models.DEEP_UNET_CONFIG)
    deep.load_state_dict(load_file(tmp_path / "b.safetensors"))
    assert set(deepen.depths(deep.state_dict()).values()) == {2, 7}
    x, context = (torch.randn(shape, generator=generator) for shape in ((1, 16, 16, 16), (1, 14, 128)))
    given = {"context": context, "y": torch.randn(1, 128 + 6 * 256, generator=generator), "transformer_options": {}}
    with torch.no_grad():
        before, after = (net(x, torch.tensor([500.0]), **given) for net in (network, deep))
    assert 0 < (before - after).norm() < 0.1 * before.norm()
