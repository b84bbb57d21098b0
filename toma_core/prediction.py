"""Features for comparing tokens: the clean picture that the previous step predicted.

The paper compares the tokens themselves, which are mostly noise in the first steps. Plans from the predicted picture
are nearly as good as plans from the final picture (docs/fidelity.md). The predicted picture is known before the model
runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Grid

_CELLS = 2  # cells of a token along each side


def similarity_features(picture: Tensor, grid: Grid, like: Tensor) -> Tensor:
    """Return the features by which tokens of a grid are compared, (B, N, F + 1). A token has the F numbers of its part
    of the picture, see `picture_tokens`, and a constant.

    Cosines ignore the lengths of tokens. The constant, the root mean square length of an image's tokens, gives tokens
    of different lengths different directions. In the mean square, tokens that hold NaN or infinity count as 0.
    """
    tokens = picture_tokens(picture, grid, like)
    squares = tokens.float().square().sum(2).nan_to_num_(0.0, 0.0)
    length = squares.mean(1, keepdim=True).sqrt().clamp_max_(torch.finfo(tokens.dtype).max).to(tokens.dtype)
    return torch.cat([tokens, length[..., None].expand(-1, tokens.shape[1], 1)], 2)


def picture_tokens(picture: Tensor, grid: Grid, like: Tensor) -> Tensor:
    """Return a picture as features of the tokens of a grid, (B, N, C or 4 C), in the dtype and on the device of `like`.

    picture: (B, C, ..., H, W), or (B, C, T, H, W) for a grid with frames. A token has 2 x 2 cells, each the mean of its
    pixels; a token that covers a single pixel has one cell.
    """
    *frames, height, width = grid
    images = len(picture)
    picture = picture.movedim(2, 1).flatten(0, 1) if frames else picture.flatten(1, -3)  # frames as images of the batch
    cells = max(1, min(_CELLS, round(picture.shape[-1] / width)))
    sizes = [side * cells for side in (height, width)]
    covers = [-(-side // size) for side, size in zip(picture.shape[-2:], sizes, strict=True)]
    # Replicate the right and bottom edges, because models round their grids up.
    bottom, right = (size * cover - side for size, cover, side in zip(sizes, covers, picture.shape[-2:], strict=True))
    if bottom or right:
        picture = F.pad(picture, (0, right, 0, bottom), mode="replicate")
    if covers != [1, 1]:
        picture = F.avg_pool2d(picture, covers)
    cut = picture.unflatten(-1, (width, cells)).unflatten(-3, (height, cells)).permute(0, 2, 4, 1, 3, 5)
    # A single copy changes layout, dtype and device.
    tokens = torch.empty(cut.shape, dtype=like.dtype, device=like.device).copy_(cut)
    return tokens.view(images, -1, cut[0, 0, 0].numel())
