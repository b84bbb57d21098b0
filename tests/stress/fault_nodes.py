"""Provide nodes that fail on demand, linked into the custom_nodes of a real server.

Widgets of `FaultLatent` select the fault. The nodes that make the MODEL have equal inputs with and without a fault, so
the MODEL stays in ComfyUI's cache.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind ComfyUI's own folders
from testbed import models

FAULTS = ("none", "error", "out of memory", "slow")
# The armed fault, and the number of attention calls until it occurs. For the fault "slow", `calls` is milliseconds per
# call.
_armed: dict[str, Any] = {"fault": "none", "calls": 0}

# Classes of a run's objects: (end of the module's name, name of the class).
KINDS = {
    ("toma_core.run", "RunState"),
    ("toma_core.cache", "_Entry"),
    ("toma_core.merge", "MergePlan"),
    ("toma_core.pipeline", "Evaluation"),
    ("toma_core.cache", "Cache"),
    ("toma_core.coverage", "Coverage"),
    ("toma_core.pipeline", "Cached"),
    ("nodes.adapters.sampling_run", "SamplingRun"),
}


def attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    import comfy.model_management

    fault = _armed["fault"]
    if fault == "slow":
        time.sleep(_armed["calls"] / 1000)
        return func(*args, **kwargs)
    _armed["calls"] -= 1
    if _armed["calls"] == 0 and fault == "error":
        raise RuntimeError("another pack's patch failed")
    if _armed["calls"] == 0 and fault == "out of memory":
        raise comfy.model_management.OOM_EXCEPTION("CUDA out of memory, as a test has it")
    return func(*args, **kwargs)


def census() -> dict[str, int]:
    """Count the live objects of runs, and all tensors except those that belong to maps of the last reports."""
    gc.collect()
    found = gc.get_objects()
    kinds = [(type(o).__module__, type(o).__name__) for o in found]
    counts = Counter(name for place, name in kinds for end, kind in KINDS if name == kind and place.endswith(end))
    (attachment,) = [module for name, module in sys.modules.items() if name.endswith("nodes.adapters.attachment")]
    drawn = 2 * sum(len(stats.maps) for stats in attachment._reports.values())
    return {**counts, "tensors": sum(issubclass(type(o), torch.Tensor) for o in found) - drawn}


# Exclude objects of imported modules from each census.
gc.collect()
gc.freeze()


class FaultModel:
    """Loads a small model whose attention can fail."""

    RETURN_TYPES = ("MODEL", "CONDITIONING", "CONDITIONING")
    FUNCTION = "load"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"kind": (["unet", "flux"],)}}

    def load(self, kind: str) -> tuple[Any, Any, Any]:
        model = getattr(models, kind)()
        model.model_options["transformer_options"]["optimized_attention_override"] = attention
        return model, models.conditioning(model, seed=1), models.conditioning(model, seed=2)


class FaultLatent:
    """Arms the fault and makes an empty latent, which ComfyUI never caches."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "channels": ("INT", {"default": 4}),
                "side": ("INT", {"default": 24}),
                "fault": (list(FAULTS),),
                "calls": ("INT", {"default": 0}),
            }
        }

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:  # noqa: N802
        return float("nan")

    def make(self, channels: int, side: int, fault: str, calls: int) -> tuple[Any]:
        _armed.update(fault=fault, calls=calls)
        return ({"samples": torch.zeros(1, channels, side, side)},)


class FaultCensus:
    RETURN_TYPES = ()
    FUNCTION = "count"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {}}

    @classmethod
    def IS_CHANGED(cls) -> float:  # noqa: N802
        return float("nan")

    def count(self) -> dict[str, Any]:
        return {"ui": {"text": [json.dumps(census())]}}


NODE_CLASS_MAPPINGS = {"FaultModel": FaultModel, "FaultLatent": FaultLatent, "FaultCensus": FaultCensus}
