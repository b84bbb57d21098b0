"""Keys and values that a run keeps of its blocks: whether there is room for them, and telling ComfyUI how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...toma_core import ToMAConfig
from .family import ModelHooks

# Bytes that they may take: two activations of every block. Flux.1 at 1024 x 1024 has 2.9 GB of them.
MOST = 6 << 30


def keys_bytes(
    hooks: ModelHooks, config: ToMAConfig, latent: Tensor, conditions: int, itemsize: int
) -> tuple[int, str]:
    """What a run on latents of (B, C, ..., H, W) keeps so that merged blocks can look at all tokens, and why they
    cannot, for the report; 0 and empty where they are not to."""
    if not config.all_keys:
        return 0, ""
    if latent.ndim > 4 and latent.shape[2] > 1:
        return 0, "a video has too many"
    needed = hooks.keys_of(latent, config) * itemsize * len(latent) * conditions
    if not needed:
        return 0, "this model's attention takes no others"
    if needed > MOST:
        return 0, f"they would take {needed / 1e9:.1f} GB, more than {MOST / 1e9:.1f}"
    return needed, ""


def conditions_of(guider: Any) -> int:
    """How many conditions are evaluated in a step, at most: without guidance the negative ones are not."""
    conds: Mapping[str, Sequence[Any]] = guider.conds
    skips = math.isclose(getattr(guider, "cfg", 0.0), 1.0) and "positive" in conds
    skips = skips and not guider.model_options.get("disable_cfg1_optimization", False)
    return max(1, len(conds["positive"]) if skips else sum(map(len, conds.values())))


@contextmanager
def reserved(model: Any, more: int) -> Iterator[None]:
    """While ComfyUI loads the model for a run, it counts so many bytes more for activations."""
    required, before = model.memory_required, vars(model).get("memory_required")
    model.memory_required = lambda *args, **kwargs: required(*args, **kwargs) + more
    try:
        yield
    finally:
        if before is None:
            del model.memory_required
        else:
            model.memory_required = before
