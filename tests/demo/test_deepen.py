"""Test that a deep UNet is initialised with the weights of the trained shallow one."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from demo import deepen, models


def test_a_deepened_file_predicts_nearly_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader must read the number of blocks from the file."""
    generator = torch.Generator().manual_seed(0)
    network = models.new_unet(0, to_train=False)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.endswith(deepen._OUTPUTS) and "transformer_blocks" in name:
                value.mul_(0.1)  # small residuals, as in a trained stack
    save_file(network.state_dict(), tmp_path / "a.safetensors")
    monkeypatch.setattr(sys, "argv", ["deepen", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])
    deepen.main()
    deep = models.load_unet(str(tmp_path / "b.safetensors")).model.diffusion_model.float()
    assert set(deepen.depths(deep.state_dict()).values()) == {2, 7}
    x, context = (torch.randn(shape, generator=generator) for shape in ((1, 16, 16, 16), (1, 14, 128)))
    given = {"context": context, "y": torch.randn(1, 128 + 6 * 256, generator=generator), "transformer_options": {}}
    with torch.no_grad():
        before, after = (net(x, torch.tensor([500.0]), **given) for net in (network, deep))
    assert 0 < (before - after).norm() < 0.1 * before.norm()
