"""Tools for the rows: a small real model per family, ComfyUI's own nodes by name, latents, prompts and files."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from testbed import models

# The preset under which all rows run. Without a preset every step is merged, which tests more strictly than a preset.
PRESET = os.environ.get("TOMA_PRESET", "")
SIDE = 24
# Presets need more steps, because the first, the last and some steps in between are full.
STEPS = 4 if PRESET else 2
# A smaller latent, for rows that have many graphs.
SMALL = {"height": 16, "width": 16}
# Transformer blocks at each resolution of encoder and decoder. Each resolution has one residual block, in the
# full SDXL two.
_SDXL = {"transformer_depth": [0, 1, 2], "transformer_depth_output": [0, 0, 1, 1, 2, 2]}
_SD15: dict[str, Any] = {"transformer_depth": [1, 1, 0], "transformer_depth_output": [1, 1, 1, 1, 0, 0], "middle": 1}

# Models of Wan's family that need another input besides the text.
_WAN: dict[str, dict[str, Any]] = {
    "scail": {"base": "WAN21_SCAIL", "kind": "WAN21_SCAIL", "model_type": "scail", "in_dim": 20},
    "wandancer": {
        **{"base": "WAN22_WanDancer", "kind": "WAN22_WanDancer", "model_type": "wandancer", "in_dim": 36},
        **{"layers": 6, "audio_inject_layers": [0, 4]},
    },
}


class AbsentError(Exception):
    """This ComfyUI lacks a node or model, or a pack is not installed. The message names what is missing."""


def part(path: str) -> Any:
    """Import a class or function from ComfyUI's module `nodes` or from a module of `comfy_extras`. Raises
    `AbsentError`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module if module == "nodes" else f"comfy_extras.{module}"), name)
    except (ModuleNotFoundError, AttributeError):
        raise AbsentError(f"this ComfyUI has no {name}") from None


def node(path: str) -> Callable[..., Any]:
    """Return a node of ComfyUI as a function: `node("nodes_freelunch.FreeU")(model, 1.1, ...)` returns the node's
    output, or a tuple if the node has several outputs. Raises `AbsentError`."""
    return as_function(part(path))


def as_function(kind: Any) -> Callable[..., Any]:
    """Return a function that runs a node. kind: class of the node, for ComfyUI's API V1 or V3."""

    def call(*args: Any, **inputs: Any) -> Any:
        # V3 nodes return a NodeOutput, V1 nodes a tuple.
        execute = kind.execute if hasattr(kind, "define_schema") else getattr(kind(), kind.FUNCTION)
        result = execute(*args, **inputs)
        outputs = getattr(result, "args", result)
        return outputs[0] if len(outputs) == 1 else outputs

    return call


def found(pack: str) -> Path:
    """Find the folder of a community pack, in TOMA_COMMUNITY_NODES or in ComfyUI's `custom_nodes`. Raises
    `AbsentError`."""
    import folder_paths

    folders = [os.environ.get("TOMA_COMMUNITY_NODES"), *folder_paths.get_folder_paths("custom_nodes")]
    for folder in filter(None, folders):
        if (Path(folder) / pack / "__init__.py").exists():
            return Path(folder) / pack
    raise AbsentError(f"{pack} is neither in TOMA_COMMUNITY_NODES nor in custom_nodes")


def version_of(pack: str) -> str:
    """Return the version of an installed community pack, as `commit abc1234 of 2026-01-31`."""
    log = ["git", "-C", str(found(pack)), "log", "-1", "--format=commit %h of %cs"]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()


def community(pack: str) -> Callable[[str], Callable[..., Any]]:
    """Load a community pack as ComfyUI does. Return a function that maps a node id to the pack's node. Raises
    `AbsentError`."""
    # Import ComfyUI's `nodes` by name, because for a type checker `nodes` is this checkout's folder `nodes`.
    nodes = importlib.import_module("nodes")
    # Put ComfyUI's folder first on the path, so that the server finds its `utils`. ComfyUI's nodes have put the folder
    # `comfy` there, which has another `utils`.
    with mock.patch.object(sys, "path", [str(Path(nodes.__file__ or "").parent), *sys.path]):
        server = importlib.import_module("server").PromptServer
    folder = found(pack)
    if not hasattr(server, "instance"):
        server(asyncio.new_event_loop())  # packs need a server, to which they add routes while they load
    if pack not in _loaded:
        _loaded[pack] = asyncio.run(nodes.load_custom_node(str(folder), module_parent="custom_nodes"))
    if not _loaded[pack]:
        raise AbsentError(f"{pack} does not load in this ComfyUI: the log says why")
    return lambda name: as_function(nodes.NODE_CLASS_MAPPINGS[name])


_loaded: dict[str, bool] = {}


def random(*shape: int, seed: int = 3, scale: float = 1.0) -> Tensor:
    """Draw normal noise, which is the same at every call with these arguments."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def patcher(module: Any) -> Any:
    """Wrap a network in a ModelPatcher, with small random weights."""
    import comfy.model_patcher

    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(filled(module), load_device=cpu, offload_device=cpu)


def filled(module: Any, seed: int = 0) -> Any:
    """Fill a module with small random weights, because ComfyUI's layers are not initialised, and return it in eval
    mode."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / fan_in**0.5 if parameter.ndim > 1 else 1.0 + 0.1 * noise
        parameter.requires_grad_(False)
    return module.eval()


class Kit:
    """One model family: `sdxl`, or one of `testbed.models.TRANSFORMERS`."""

    def __init__(self, name: str) -> None:
        self.name = name
        by_name = {
            "sdxl": 4,
            "h3": 24,
            "qwen_image21": 64,
            **dict.fromkeys(("flux2", "ltx", "ltx_av", "ernie", "ideogram", "lens"), 128),
        }
        self.channels = by_name.get(name, 16)
        # Number of frames of models with video latents, (B, C, T, H, W).
        several = {"krea2": 1, "qwen_image": 1, "cosmos": 2, "h3": 2, "ltx": 2}
        several |= dict.fromkeys(("wan", "hunyuan", *_WAN), 3)
        self.frames = (several[name],) if name in several else ()

    @property
    def is_flux(self) -> bool:
        return self.name == "flux"

    def build(self, seed: int = 0, **config: Any) -> Any:
        """Build a small model of the family: a UNet of 11 transformer blocks, a Flux of 3 double and 3 single blocks,
        or another transformer of 2 to 5 blocks. Raises `AbsentError` if ComfyUI is older than the model."""
        if self.name == "sdxl":
            return models.unet(seed, **{"num_res_blocks": [1, 1, 1], **_SDXL, **config})
        try:
            if self.name in _WAN:
                return models.wan(seed, **{**_WAN[self.name], **config})
            if self.name == "qwen_image21":  # with ComfyUI's cache on, as if no node switched it off
                config = {"cache": "auto", **config}
            return models.TRANSFORMERS[self.name](seed, **config)
        except (ImportError, AttributeError):
            raise AbsentError(f"this ComfyUI has no {self.name}") from None

    def build_sd15(self) -> Any:
        """Build a UNet with attention at full resolution, as in SD1.5."""
        return self.build(**_SD15)

    @cached_property
    def model(self) -> Any:
        """Return the model that rows share."""
        return self.build()

    @cached_property
    def other_model(self) -> Any:
        """Return the same network with other weights."""
        return self.build(seed=1)

    def prompt(self, seed: int = 1, tokens: int = 7, **options: Any) -> list[Any]:
        """Return CONDITIONING of random text, with the poses of SCAIL or the music of WanDancer."""
        beside: dict[str, Any] = {}
        if self.name == "scail":
            beside = {"pose_video_latent": random(1, 16, 3, 10, 14)}
        if self.name == "wandancer":
            beside = {"audio_embed": random(1, 20, 35)}
        return models.conditioning(self.model, tokens, seed, **{**beside, **options})

    @property
    def prompts(self) -> tuple[list[Any], list[Any]]:
        """Return positive and negative CONDITIONING for plain sampling."""
        return self.prompt(1), self.prompt(2)

    def sample(self, model: Any, **options: Any) -> Tensor:
        """Sample with ComfyUI's plain sampler: a latent of (B, C, H, W), or (B, C, T, H, W)."""
        height, width = options.pop("height", SIDE), options.pop("width", SIDE)
        steps = max(options.pop("steps", STEPS), 4 if PRESET else 1)
        (frames,) = self.frames or (1,)
        if self.name in _WAN:
            options = {**dict(zip(("positive", "negative"), self.prompts, strict=True)), **options}
        return models.sample(model, height, width, **{"frames": frames, "steps": steps, **options})

    def latent(self, side: int = SIDE, seed: int | None = None) -> dict[str, Tensor]:
        """Return a LATENT: an empty one if `seed` is None, otherwise noise in the shape of an encoded picture."""
        if seed is None:
            return {"samples": torch.zeros(1, self.channels, side, side)}
        return {"samples": random(1, self.channels, *self.frames, side, side, seed=seed)}

    def path(self, kind: str, name: str) -> Path:
        """Return a path for a model file of this kind. ComfyUI's loaders find a file at this path by its name."""
        import folder_paths

        folder = _scratch() / kind
        if not folder.exists():
            folder.mkdir()
            folder_paths.add_model_folder_path(kind, str(folder))
        return folder / f"{self.name}-{name}"

    def file(self, kind: str, name: str, content: Any) -> str:
        """Write a model file for loader nodes and return its name. content: for safetensors, tensors by name; for other
        files, any object for torch.save."""
        from safetensors.torch import save_file

        path = self.path(kind, name)
        if path.suffix == ".safetensors":
            save_file(content, path)
        else:
            torch.save(content, path)
        return path.name

    def lora(self, seed: int = 7, rank: int = 2) -> dict[str, Tensor]:
        """Return a LoRA for every linear layer of the blocks."""
        found = {}
        for name, weight in self.block_weights(self.model).items():
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            out, into = weight.shape
            found[f"{key}.lora_up.weight"] = random(out, rank, seed=seed, scale=0.3)
            found[f"{key}.lora_down.weight"] = random(rank, into, seed=seed + 1, scale=into**-0.5)
        return found

    @staticmethod
    def block_weights(model: Any) -> dict[str, Tensor]:
        """Return the weights of all linear layers in a model's blocks, by name."""
        return {
            name: weight
            for name, weight in model.model.diffusion_model.named_parameters()
            if ("blocks" in name or name.startswith("layers.")) and name.endswith(".weight") and weight.ndim == 2
        }


_folders: list[tempfile.TemporaryDirectory[str]] = []


def _scratch() -> Path:
    """Return a folder that is removed when this process ends."""
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="toma-compatibility-"))
    return Path(_folders[0].name)
