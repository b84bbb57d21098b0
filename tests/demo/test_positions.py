"""Test the UNet's position codes: every cell of a picture has its own code, and a crop has the codes of its place."""

from __future__ import annotations

from typing import Any

import torch

from demo.models import load_unet
from demo.positions import AddPositions, cell_centres, code
from tests.loop import loop


@loop("channels", [32, 64])
def test_every_cell_has_its_own_code(channels: int) -> None:
    codes = code(cell_centres(64), cell_centres(64), channels)[0].flatten(1).T
    distances = torch.cdist(codes, codes).fill_diagonal_(9.0).min(1).values
    assert distances.min() > 0.05
    assert codes[:, channels // 2 :].eq(0).all()
    assert not codes[:, : channels // 2].eq(0).all(0).any()


def test_half_size_cells_have_the_mean_centre() -> None:
    torch.testing.assert_close(cell_centres(32), cell_centres(64).view(32, 2).mean(1))


@loop("first", [0, 6, 20])
def test_a_crop_has_the_code_of_its_offset(first: int) -> None:
    full = code(cell_centres(64), cell_centres(64), 32)
    part = code(cell_centres(32, first, 64), cell_centres(32, 10, 64), 32)
    torch.testing.assert_close(part, full[:, :, first : first + 32, 10:42])


def test_only_the_first_block_gets_it() -> None:
    h, patch = torch.zeros(2, 32, 6, 10), AddPositions()
    torch.testing.assert_close(patch(h, {"block": ("input", 0)})[1:], code(cell_centres(6), cell_centres(10), 32))
    for block in (("input", 1), ("middle", 0)):
        assert patch(h, {"block": block}) is h


def test_the_loaded_unet_has_it() -> None:
    patches: dict[str, Any] = load_unet(None).model_options["transformer_options"]["patches"]
    assert [type(patch) for patch in patches["input_block_patch"]] == [AddPositions]
