"""Store a run's latents and predicted pictures, and measure how much new noise an evaluation's latent has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...toma_core.decision import MAX_NEW_NOISE
from ...toma_core.innovation import History
from .sigmas import SigmaStep

# Maximum number of sets of conditions whose pictures are stored.
_MAX_HISTORIES = 8


@dataclass(eq=False)
class Trajectory:
    """The results of a sampler's evaluations, stored by the set of conditions that were evaluated. So no plan is made
    from a picture that was predicted for other conditions."""

    reads: bool = True  # whether noise may be measured, which makes the host wait for the device
    latent: Tensor | None = None  # latent of the evaluation in progress, (B, C, ..., H, W); None if not yet known
    new_noise: float = float("inf")  # new noise in `latent`, as a share of all its noise; inf if unknown
    another: bool = False  # whether `latent` differs from an earlier one at the same `_place`
    _histories: dict[Hashable, History] = field(default_factory=dict)
    _place: tuple[Hashable, ...] = (None,)  # step, noise level and conditions of the evaluation in progress
    _repeats: set[int | None] = field(default_factory=set)  # steps that evaluated more than one latent

    @property
    def tiles(self) -> bool:
        """Whether the evaluation's latent must be treated as a tile. It must be if it differs from an earlier latent of
        this step, or if several steps have each evaluated several latents: tiles may then come in any order."""
        return self.another or len(self._repeats) > 1

    def next(self) -> None:
        self.latent, self.another, self.new_noise = None, False, float("inf")

    def observe(self, latent: Tensor, at: SigmaStep, kind: Hashable) -> None:
        """Compare the latent of an evaluation with earlier latents of the same conditions. kind: the conditions."""
        place = at.step, at.model_sigma, kind
        again = place == self._place
        self.latent, self._place = latent, place
        if not self.reads:
            self.new_noise = 0.0
            return
        history = self._histories.get(kind)
        new = None if history is None else history.new_noise(latent, at.model_sigma)
        self.new_noise = float("inf") if new is None else float(new.detach())
        self.another = again and not self.new_noise <= MAX_NEW_NOISE
        if self.another:
            self._repeats.add(at.step)

    def predicted(self, picture: Tensor) -> None:
        """Note the clean picture that the evaluation predicted, (B, C, ..., H, W)."""
        if self.latent is None or self.another:
            return
        history = self._histories.pop(self._place[-1], None) or History(compared=self.reads)
        try:
            history.note(self.latent, picture)
        except torch.OutOfMemoryError:
            return  # finish the picture, without comparing the next latent with an earlier one
        self._histories[self._place[-1]] = history
        for oldest in list(self._histories)[:-_MAX_HISTORIES]:
            del self._histories[oldest]

    def prediction(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return the last picture of this shape that was predicted for the conditions of the evaluation in progress."""
        history = self._histories.get(self._place[-1])
        return None if history is None else history.prediction(shape)

    def close(self) -> None:
        self._histories.clear()
        self.latent = None
