"""Provide nodes for a real server: one counts the server's live objects, one loads small models of every family, and
one makes their attention fail."""

import ctypes
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import comfy.model_management
import torch

PACK = "ComfyUI-ToMA"

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind ComfyUI's own folders
from testbed import models  # noqa: E402

# The armed fault, and the number of attention calls until it occurs.
armed = {"fault": "none", "calls": 0}


def attention(func, *args, **kwargs):
    """Attend as `func` does, unless the armed fault occurs."""
    armed["calls"] -= 1
    if armed["calls"] == 0:
        occur(armed["fault"])
    return func(*args, **kwargs)


def occur(fault):
    """Raise the error of a fault. The fault "hold" waits until the prompt is interrupted."""
    if fault == "error":
        raise RuntimeError("another pack's patch failed")
    if fault == "out of memory":
        raise comfy.model_management.OOM_EXCEPTION("CUDA out of memory, as a test has it")
    while fault == "hold":
        comfy.model_management.throw_exception_if_processing_interrupted()
        time.sleep(0.02)


def tensors():
    """Count the live tensors, except those in the merge maps of the last reports."""
    attachments = [module for name, module in sys.modules.items() if name.endswith("nodes.adapters.attachment")]
    drawn = 2 * sum(len(stats.maps) for module in attachments for stats in module._reports.values())
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) - drawn


class LabCensus:
    """Counts live objects between prompts. nonce: a new number prevents ComfyUI from using a cached count."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "count", True, "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"nonce": ("INT", {"default": 0})}}

    def count(self, nonce):
        gc.collect()
        if sys.platform == "linux":  # return memory that the allocator holds but does not use
            ctypes.CDLL(None).malloc_trim(0)
        kinds = [type(o) for o in gc.get_objects()]
        objects = Counter(kind.__name__ for kind in kinds if PACK in str(getattr(kind, "__module__", "")))
        counted = {"objects": objects, "tensors": tensors()}
        return {"ui": {"text": [json.dumps(counted)]}}


class LabModel:
    """Loads a small model of a family, with random weights from a seed, and two prompts for it. faulty: the model's
    attention fails if LabLatent has armed a fault. Prompts with and without a fault have the same inputs here, so
    ComfyUI keeps the MODEL in its cache."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CONDITIONING", "CONDITIONING"), "load", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        more = {"seed": ("INT", {"default": 0}), "faulty": ("BOOLEAN", {"default": False})}
        return {"required": {"family": (list(models.KINDS),), **more}}

    def load(self, family, seed, faulty):
        model = getattr(models, family)(seed)
        if faulty:
            model.model_options["transformer_options"]["optimized_attention_override"] = attention
        return model, *(models.conditioning(model, seed=number) for number in (1, 2))


class LabLatent:
    """Arms a fault and makes an empty latent, which ComfyUI never caches."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "make", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        sizes = {name: ("INT", {"default": 0}) for name in ("channels", "side", "calls")}
        return {"required": {**sizes, "fault": (["none", "error", "out of memory", "hold"],)}}

    @classmethod
    def IS_CHANGED(cls, **_):  # noqa: N802 - ComfyUI's name
        return float("nan")

    def make(self, channels, side, calls, fault):
        armed.update(fault=fault, calls=calls)
        return ({"samples": torch.zeros(1, channels, side, side)},)


NODE_CLASS_MAPPINGS = {"LabCensus": LabCensus, "LabModel": LabModel, "LabLatent": LabLatent}
