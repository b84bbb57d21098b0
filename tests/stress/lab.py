"""Provide a node pack for a real server: a node that counts the server's live objects, and a loader of small models of
every family."""

import ctypes
import gc
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from server import PromptServer

PACK = "ComfyUI-ToMA"

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind ComfyUI's own folders
from testbed import models  # noqa: E402


def objects_of_the_pack():
    """Count the live instances of each class of ToMA."""
    return Counter(type(o).__name__ for o in gc.get_objects() if PACK in str(getattr(type(o), "__module__", "")))


def tensor_bytes():
    """Count the bytes of all tensors; tensors that share a storage count once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def routes():
    """Return method, path and handler's file of every HTTP route."""
    found = []
    for route in PromptServer.instance.app.router.routes():
        code = getattr(route.handler, "__code__", None)
        found.append([route.method, route.resource.canonical, code.co_filename if code else ""])
    return found


class LabCensus:
    """Counts live objects between prompts. nonce: a new number prevents ComfyUI from using a cached count."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "count", True, "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"nonce": ("INT", {"default": 0}), "with_routes": ("BOOLEAN", {"default": False})}}

    def count(self, nonce, with_routes):
        gc.collect()
        if sys.platform == "linux":  # return memory that the allocator holds but does not use
            ctypes.CDLL(None).malloc_trim(0)
        counted = {
            "objects": objects_of_the_pack(),
            "tensor_bytes": tensor_bytes(),
            "routes": routes() if with_routes else [],
        }
        return {"ui": {"text": [json.dumps(counted)]}}


class LabModel:
    """Loads a small model of a family, with random weights from a seed, and two prompts for it."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CONDITIONING", "CONDITIONING"), "load", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"family": (list(models.TRANSFORMERS),), "seed": ("INT", {"default": 0})}}

    def load(self, family, seed):
        model = models.TRANSFORMERS[family](seed)
        return model, *(models.conditioning(model, seed=number) for number in (1, 2))


NODE_CLASS_MAPPINGS = {"LabCensus": LabCensus, "LabModel": LabModel}
