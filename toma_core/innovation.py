"""Keep the latents and predicted pictures of recent evaluations, and measure how much noise in a later latent is new.

The paper does not measure noise. A sampler that adds no noise begins each step with a linear combination of earlier
latents and predictions. The part of a latent that is not such a combination is new. The new part is noise if the
sampler draws noise in every step, as `euler_ancestral` does. Otherwise the latent belongs to another picture.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_RECENT = 3  # earlier evaluations that a latent is compared with: solvers of third order combine three
_CELL = 8  # side of the square cells of the latent over which new noise is averaged
_NEGLIGIBLE = 0.05  # noise below this share of the latent's root mean square no longer changes the picture
# A recent latent or prediction counts as a combination of others if its part orthogonal to them is below this share of
# its norm.
_ROUNDING = 1e-5


@dataclass(eq=False)
class History:
    """The last evaluations of one set of conditions, which are evaluated together."""

    compared: bool = True  # whether latents are kept for comparison with later ones
    _recent: deque[tuple[Tensor, Tensor]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def prediction(self, shape: torch.Size | tuple[int, ...]) -> Tensor | None:
        """Return the last predicted picture of this shape, (B, C, ..., H, W); None if there is none."""
        return next((picture for _, picture in reversed(self._recent) if picture.shape == shape), None)

    def note(self, latent: Tensor, prediction: Tensor) -> None:
        """Note an evaluation: the model's input and the clean picture that it predicts, both (B, C, ..., H, W)."""
        # Clone, because the sampler may overwrite its latent.
        self._recent.append((latent.clone() if self.compared else prediction, prediction))
        if not self.compared and len(self._recent) > 1:
            self._recent.popleft()

    def new_noise(self, latent: Tensor, sigma: float) -> Tensor | None:
        """Return the share of a latent's noise that is new, in the cell where this share is largest, as a scalar
        tensor. Return None without earlier latents of this shape. The host does not wait for the device. latent: (B, C,
        ..., H, W). sigma: standard deviation of the noise."""
        directions = [each for pair in self._recent for each in pair if each.shape == latent.shape]
        if not self.compared or not directions:
            return None
        basis = list[Tensor]()
        for direction in reversed(directions):
            rest = _without(direction.float(), basis)
            size = torch.linalg.vector_norm(rest)
            independent = size > _ROUNDING * torch.linalg.vector_norm(direction.float())
            basis.append(rest * torch.where(independent, 1 / size.clamp_min(1e-30), 0.0))
        latent = latent.float()
        noise = (_NEGLIGIBLE * latent.square().mean().sqrt()).clamp_min(max(sigma, 1e-9))
        # A mean over the entire picture would hide new noise in a small area that is sampled under a mask.
        new = _without(latent, basis).square().mean(1).flatten(0, -3)[:, None]
        cell = [min(_CELL, side) for side in new.shape[2:]]
        return F.avg_pool2d(new, cell, ceil_mode=True, count_include_pad=False).max().sqrt() / noise


def _without(t: Tensor, basis: list[Tensor]) -> Tensor:
    """Return a tensor without its parts along orthonormal directions (modified Gram-Schmidt)."""
    for direction in basis:
        t = t - (t * direction).sum() * direction
    return t
