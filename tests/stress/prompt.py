"""Provide the sampling that tests repeat after every fault."""

import hashlib
from typing import Any

import torch

from scripts.comfy_pack import pack_module
from testbed import models

SIDE = 24
STEPS = 3
# Merge all grids and blocks in every step, because small models have small grids and few blocks.
EVERYTHING = {
    "min_tokens": 4, "skip_first_blocks": 0, "skip_last_blocks": 0, "full_step_interval": 0,
    "selection_interval": 10, "kv_cache": False,
}  # fmt: skip
# Settings by case. None: without ToMA.
CASES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "stack": EVERYTHING,
    "module": {**EVERYTHING, "granularity": "module", "selection_interval": 1},
    "detail": {**EVERYTHING, "granularity": "block", "full_step_interval": 2},
    # As ToMA Advanced samples on a server. If every step selects, the preset's weight interval has no effect.
    "served": {**EVERYTHING, "selection_interval": 1, "window_size": 8},
}


def sample(model: Any, **options: Any) -> torch.Tensor:
    """Sample a latent (1, C, SIDE, SIDE) in fp32."""
    return models.sample(model, SIDE, SIDE, steps=STEPS, **options)


def digest(latent: torch.Tensor) -> str:
    """Hash all bits of a latent. The latent must be finite."""
    assert latent.isfinite().all()
    return hashlib.sha256(latent.float().contiguous().numpy().tobytes()).hexdigest()


def patched(model: Any, case: str, **settings: Any) -> Any:
    """Apply ToMA with the settings of a case and with more `settings`."""
    chosen = CASES[case]
    if chosen is None:
        return model
    config = pack_module("toma_core.config").ToMAConfig(**{**chosen, **settings})
    return pack_module("nodes.adapters.patch_model").apply_toma(model, config)
