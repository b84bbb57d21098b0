"""A pack for real servers: small models of every family, faults on demand, and a count of live objects.

Servers link this file as another pack, see the fixtures of `server/conftest.py` and `stress/conftest.py`.
"""

import ctypes
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from server import PromptServer

PACK = "ComfyUI-ToMA"

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after ComfyUI's own modules
from testbed import models  # noqa: E402

FAULTS = ("none", "error", "out of memory", "slow")
# The armed fault, and the remaining calls of attention until it occurs; for a slow run, milliseconds per call.
ARMED = {"fault": "none", "calls": 0}


def faulty_attention(func, *args, **kwargs):
    """An attention override that raises the armed fault."""
    import comfy.model_management

    fault = ARMED["fault"]
    if fault == "slow":
        time.sleep(ARMED["calls"] / 1000)
        return func(*args, **kwargs)
    ARMED["calls"] -= 1
    if ARMED["calls"] == 0 and fault == "error":
        raise RuntimeError("another pack's patch failed")
    if ARMED["calls"] == 0 and fault == "out of memory":
        raise comfy.model_management.OOM_EXCEPTION("CUDA out of memory, as a test has it")
    return func(*args, **kwargs)


def objects_of_the_pack():
    """Count the instances of each class of the pack."""
    return Counter(type(o).__name__ for o in gc.get_objects() if PACK in str(getattr(type(o), "__module__", "")))


def tensor_bytes():
    """Count the bytes of all tensors, each storage once, without the drawings for the last reports."""
    objects = gc.get_objects()
    drawn = {id(t) for o in objects if type(o).__name__ == "MergeMap" for t in (o.owner, o.destinations)}
    storages = {}
    for thing in objects:
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided and id(thing) not in drawn:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def routes():
    """Return method, path and handler's file of every route."""
    found = []
    for route in PromptServer.instance.app.router.routes():
        code = getattr(route.handler, "__code__", None)
        found.append([route.method, route.resource.canonical, code.co_filename if code else ""])
    return found


class LabCensus:
    """Counts live objects between prompts. nonce: another number forces another count."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "count", True, "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"nonce": ("INT", {"default": 0}), "with_routes": ("BOOLEAN", {"default": False})}}

    def count(self, nonce, with_routes):
        gc.collect()
        if sys.platform == "linux":  # free memory that the allocator holds does not count as used
            ctypes.CDLL(None).malloc_trim(0)
        counted = {
            "objects": objects_of_the_pack(),
            "tensor_bytes": tensor_bytes(),
            "routes": routes() if with_routes else [],
        }
        return {"ui": {"text": [json.dumps(counted)]}}


class LabModel:
    """A small model with random weights from a seed, and two prompts for it. faulty: its attention can fail."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CONDITIONING", "CONDITIONING"), "load", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        inputs = {"kind": (list(models.KINDS),), "seed": ("INT", {"default": 0})}
        return {"required": inputs, "optional": {"faulty": ("BOOLEAN", {"default": False})}}

    def load(self, kind, seed, faulty=False):
        model = getattr(models, kind)(seed)
        if faulty:
            model.model_options["transformer_options"]["optimized_attention_override"] = faulty_attention
        return model, *(models.conditioning(model, seed=number) for number in (1, 2))


class LabFault:
    """Passes a latent on and arms the fault of a prompt; it is never cached."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "arm", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"samples": ("LATENT",), "fault": (list(FAULTS),), "calls": ("INT", {"default": 0})}}

    @classmethod
    def IS_CHANGED(cls, **_):  # noqa: N802 - ComfyUI's name
        return float("nan")

    def arm(self, samples, fault, calls):
        ARMED.update(fault=fault, calls=calls)
        return (samples,)


NODE_CLASS_MAPPINGS = {"LabCensus": LabCensus, "LabModel": LabModel, "LabFault": LabFault}
