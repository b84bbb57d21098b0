"""Measure the pictures of a setting against the unmerged pictures of the same model and scenes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from .metrics import measure
from .settings import Setting

# Number of pictures of each setting that are stored for the contact sheets.
SHOWN = 8


@dataclass(frozen=True)
class Conditions:
    """The conditions of the measurements. seeds: number of sets of pictures. images: pictures in a set. weights: digest
    of the weight files."""

    model: str
    weights: str
    images: int
    seeds: int
    steps: int
    size: int
    cfg: float
    dtype: str
    batch: int


def load(kind: str, path: Path, dtype: str) -> Any:
    """Load the model with weights and activations in `dtype`, although ComfyUI by default computes in fp32 on a CPU."""
    from comfy.cli_args import args

    from demo import sampling

    before = args.bf16_unet, args.fp32_unet
    args.bf16_unet, args.fp32_unet = dtype == "bf16", dtype == "fp32"
    try:
        model = sampling.load(kind, path)
    finally:
        args.bf16_unet, args.fp32_unet = before
    model.model.manual_cast_dtype = None
    return model


@dataclass
class Drawn:
    """Pictures of one setting. latents: one tensor for each set of pictures. flops: FLOPs per picture."""

    latents: list[Tensor]
    flops: float


class Judge:
    """Samples with one model, and measures the pictures."""

    def __init__(self, conditions: Conditions, weights: Path) -> None:
        from demo.checker import FIRST_TEST_SEED, load_checker
        from demo.sampling import defaults
        from demo.scenes import scene_from_seed

        self.conditions, self.path = conditions, weights / f"{conditions.model}.safetensors"
        self.model = load(conditions.model, self.path, conditions.dtype)
        self.checker = load_checker(weights / "checker.safetensors")
        self.options = {**defaults(conditions.model, conditions.steps), "cfg": conditions.cfg, "size": conditions.size}
        count = conditions.images
        self.seeds = [[*range(group * count, (group + 1) * count)] for group in range(conditions.seeds)]
        self.scenes = [[scene_from_seed(FIRST_TEST_SEED + seed) for seed in seeds] for seeds in self.seeds]
        self.plain = self._drawn(self.model, conditions.steps)

    def _generate(self, model: Any, steps: int, group: int, count: int | None = None) -> Tensor:
        from demo.sampling import generate

        scenes, seeds = self.scenes[group][:count], self.seeds[group][:count]
        return generate(model, scenes, seeds, steps=steps, batch=self.conditions.batch, **self.options)

    def _drawn(self, model: Any, steps: int) -> Drawn:
        with counting() as counter:  # count only the first set, because counting takes time
            latents = [self._generate(model, steps, 0)]
        latents += [self._generate(model, steps, group) for group in range(1, len(self.seeds))]
        return Drawn(latents, counter.get_total_flops() / self.conditions.images)

    def rounding(self, count: int = 4) -> float:
        """Return the error of the unmerged pictures against the same pictures computed in fp32. Merging errors below
        this value are rounding noise."""
        from .metrics import relative_error

        exact = load(self.conditions.model, self.path, "fp32")
        latent = self._generate(exact, self.conditions.steps, 0, count)
        return float(relative_error(self.plain.latents[0][:count], latent).mean())

    def row(self, setting: Setting | None) -> tuple[dict[str, Any], Tensor]:
        """Return all metrics of one setting (None: the unmerged model), and its first pictures."""
        from demo.checker import accuracy, frechet_distance
        from demo.latents import decode
        from demo.models import token_pixels

        drawn = self.plain
        if setting is not None:
            drawn = self._drawn(setting.patch(self.model), max(1, round(self.conditions.steps * setting.steps)))
        window, token = 8 if setting is None else setting.window, token_pixels(self.model)
        groups = []
        for latent, plain in zip(drawn.latents, self.plain.latents, strict=True):
            figures = measure(decode(latent), latent, decode(plain), plain, window, token)
            groups.append({name: float(value.mean()) for name, value in figures.items()})
        row: dict[str, Any] = {name: sum(g[name] for g in groups) / len(groups) for name in groups[0]}
        means = torch.tensor([g["error"] for g in groups])
        row["spread"] = float(means.std()) if len(groups) > 1 else 0.0
        pictures = self._for_checker(drawn.latents)
        row["frechet"] = frechet_distance(self.checker.features(pictures), self.features)
        row["attributes"] = accuracy(self.checker, pictures, [scene for group in self.scenes for scene in group])["all"]
        row["cost"] = drawn.flops / self.plain.flops
        row = {name: float(f"{value:.6g}") for name, value in row.items()}
        return row, decode(drawn.latents[0][:SHOWN])

    @cached_property
    def features(self) -> Tensor:
        """Draw the scenes by `render_batch`, without a model, and return the checker's features of these pictures."""
        from demo.checker import for_checker
        from demo.scenes import render_batch

        real = for_checker(render_batch([scene for group in self.scenes for scene in group], self.conditions.size))
        return self.checker.features(real)

    def _for_checker(self, latents: list[Tensor]) -> Tensor:
        """Decode latents into pictures of the checker's size, in -1..1."""
        from demo.checker import for_checker
        from demo.latents import decode

        return for_checker(decode(torch.cat(latents)))


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of matrix multiplications, and on a CPU also those of its fused attention."""

    def attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={on_cpu: attention}) as counter:
        yield counter
