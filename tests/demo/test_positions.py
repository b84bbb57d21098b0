"""Test the UNet's position codes: every cell of a picture has its own code, and a crop has the codes of its place."""

import torch

from demo.models import load_unet
from demo.positions import cell_centres, code


def test_every_cell_has_its_own_code_and_a_crop_has_the_codes_of_its_place() -> None:
    full = code(cell_centres(64), cell_centres(64), 32)
    cells = full[0].flatten(1).T
    assert torch.cdist(cells, cells).fill_diagonal_(9.0).min() > 0.05
    for first in (0, 6, 20):
        part = code(cell_centres(32, first, 64), cell_centres(32, 10, 64), 32)
        torch.testing.assert_close(part, full[:, :, first : first + 32, 10:42])
    torch.testing.assert_close(cell_centres(32), cell_centres(64).view(32, 2).mean(1))


def test_only_the_first_block_of_the_loaded_unet_gets_it() -> None:
    (patch,) = load_unet(None).model_options["transformer_options"]["patches"]["input_block_patch"]
    h = torch.zeros(2, 32, 6, 10)
    torch.testing.assert_close(patch(h, {"block": ("input", 0)})[1:], code(cell_centres(6), cell_centres(10), 32))
    for block in (("input", 1), ("middle", 0)):
        assert patch(h, {"block": block}) is h
