"""Provide the sampling that tests repeat after every fault. As a script, this file samples in a process without faults.

`python tests/stress/prompt.py unet` prints {"unet": {case: hash}}. The tests load this file as a module too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from testbed import models

SIDE = 24
STEPS = 3
# Merge all grids and blocks in every step, because small models have small grids and few blocks.
EVERYTHING = {
    "min_tokens": 4, "skip_first_blocks": 0, "skip_last_blocks": 0, "full_step_interval": 0,
    "selection_interval": 10, "similarity_from": "tokens", "kv_cache": False,
}  # fmt: skip
# Settings by case. None: without ToMA.
CASES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "stack": EVERYTHING,
    "module": {**EVERYTHING, "granularity": "module", "selection_interval": 1},
    "detail": {**EVERYTHING, "granularity": "block", "full_step_interval": 2},
}


def sample(model: Any, **options: Any) -> torch.Tensor:
    """Sample a latent (1, C, SIDE, SIDE) in fp32."""
    return models.sample(model, SIDE, SIDE, steps=STEPS, **options)


def digest(latent: torch.Tensor) -> str:
    """Hash all bits of a latent. The latent must be finite."""
    assert latent.isfinite().all()
    return hashlib.sha256(latent.float().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    from scripts.comfy_pack import pack_module, use_comfyui
    from testbed.stand_ins import use_newer_models

    use_comfyui()
    use_newer_models()
    torch.set_num_threads(1)
    attach, config = pack_module("nodes.adapters.patch_model").apply_toma, pack_module("toma_core.config").ToMAConfig
    found = {}
    for kind in sys.argv[1:]:
        model = getattr(models, kind)()
        each = {
            name: model if settings is None else attach(model, config(**settings)) for name, settings in CASES.items()
        }
        found[kind] = {name: digest(sample(patched)) for name, patched in each.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
