"""The clean picture that the step before predicted, as features by which tokens are compared.

Not in the paper, which compares the tokens themselves. What a block gives is shared among tokens, and tokens that look
alike going in, mostly noise in the first steps, are not those that come out alike. The picture that the model saw in
them a step earlier tells nearly as well as the outcome itself (docs/fidelity.md), is known before the model runs, and
is short: 64 numbers a token in most models, where the tokens have thousands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Grid

# Of the picture that a token shows, so many cells by so many are told apart.
_CELLS = 2
# While more than this of what a model sees is noise, its prediction is still a mean of many pictures: what decides
# between them lies in the noise, and sharing by the prediction would discard it
# (benchmarks/results/fidelity/trials.md).
_MOST_NOISE = 0.92


def trusted_below(flow: bool) -> float:
    """The noise level from which on predictions tell more than tokens. flow: the model mixes noise and picture by s and
    1 - s; others add noise to the picture, s / (1 - s) as much."""
    return _MOST_NOISE if flow else _MOST_NOISE / (1 - _MOST_NOISE)


def picture_tokens(picture: Tensor, grid: Grid, like: Tensor) -> Tensor:
    """A picture as features of the tokens of a grid: 2 x 2 cells a token, each the mean of what it covers; one cell
    where a token covers no more. (B, C, ..., H, W), of a grid with frames (B, C, T, H, W) -> (B, N, C or 4 C) of the
    dtype and device of `like`."""
    *frames, height, width = grid
    images = len(picture)
    # Each frame as a picture of its own.
    picture = picture.movedim(2, 1).flatten(0, 1) if frames else picture.flatten(1, -3)
    cells = max(1, min(_CELLS, round(picture.shape[-1] / width)))
    sizes = [side * cells for side in (height, width)]
    covers = [-(-side // size) for side, size in zip(picture.shape[-2:], sizes, strict=True)]
    # Models round their grids up: what is missing at the right and below is as what is next to it.
    bottom, right = (size * cover - side for size, cover, side in zip(sizes, covers, picture.shape[-2:], strict=True))
    if bottom or right:
        picture = F.pad(picture, (0, right, 0, bottom), mode="replicate")
    if covers != [1, 1]:
        picture = F.avg_pool2d(picture, covers)
    cut = picture.unflatten(-1, (width, cells)).unflatten(-3, (height, cells)).permute(0, 2, 4, 1, 3, 5)
    # Laid out, cast and brought to the device in one copy.
    tokens = torch.empty(cut.shape, dtype=like.dtype, device=like.device).copy_(cut)
    return tokens.view(images, -1, cut[0, 0, 0].numel())
