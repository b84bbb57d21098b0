"""What tokens are compared by where their own numbers cannot be."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def latent_tokens(latent: Tensor, grid: tuple[int, int]) -> Tensor:
    """What of a latent lies under each token of a grid. (B, C, H, W) -> (B, height * width, C * side * side)

    A token stands for a square of cells whose side is a power of two, as in every model that halves its grids or cuts
    them into patches. Where the grid reaches past the latent, its last row and column go on.
    """
    height, width = grid
    H, W = latent.shape[-2:]
    rows, columns = _side(H, height), _side(W, width)
    padded = F.pad(latent, (0, columns * width - W, 0, rows * height - H), mode="replicate")
    cells = padded.unflatten(3, (width, columns)).unflatten(2, (height, rows))
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _side(cells: int, tokens: int) -> int:
    """The smallest power of two of which so many tokens cover so many cells."""
    return 1 << (-(-cells // tokens) - 1).bit_length()
