"""The demo's graphs in ComfyUI's API format, and the files that the server needs to run them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from scripts.comfyui import ROOT
from toma_core.config import ToMAConfig, setting_spec
from toma_core.cost_model import FEWEST

from .compact import load_weights

WEIGHTS_FOLDER = ROOT / "demo" / "weights"
DIT_FILE = "toma_demo_dit.safetensors"
SAMPLER, REPORT, PICTURE, LATENT = "sampler", "report", "picture", "latent_file"
PICTURE_SCALE = 2
RATIO = 0.5

Graph = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """One of the two model architectures: its name, and how to load, sample and merge it.

    `sampling` are the settings that demo.sampling found best for the trained model, and `steps` is the usual number of
    steps for this kind.
    """

    name: str
    title: str
    sampling: dict[str, Any]
    steps: int

    @property
    def trained(self) -> bool:
        """Return whether trained weights are in this checkout."""
        return (WEIGHTS_FOLDER / f"{self.name}.safetensors").is_file()


UNET = Kind("deep", "SDXL UNet, tiny", {"cfg": 2.0, "sampler_name": "euler", "scheduler": "normal"}, steps=8)
DIT = Kind("dit", "Flux, tiny", {"cfg": 2.0, "sampler_name": "euler", "scheduler": "simple"}, steps=12)
KINDS = (UNET, DIT)


def sampling_graph(
    kind: Kind, pixels: int, steps: int, seed: int, merged: bool, batch: int = 1, **settings: Any
) -> Graph:
    """Return the graph of a batch of pictures of pixels x pixels. The scenes come from `seed` and the seeds after it.

    Node ids are the same with and without ToMA, so that the server does not load the model again. If `merged`, ToMA
    Advanced is between loader and sampler. Its `settings` change the preset `balanced`. On Flux the preset merges only
    in runs of three or more steps. `full_step_interval=0` merges every step.
    """
    model = ["loader", 0]
    graph: Graph = {
        "loader": _loader(kind),
        "scene": _node("ToMADemoScene", seed=seed, batch_size=batch),
        "empty": _node("ToMADemoLatent", width=pixels, height=pixels, batch_size=batch),
    }
    if merged:
        # Set `min_tokens`. Auto would not merge such small blocks, because a GPU computes them very fast anyway.
        widgets = widget_values(**{"min_tokens": FEWEST, **settings})
        graph["toma"] = _node("ToMAAdvanced", model=model, **widgets)
        model = ["toma", 0]
    graph[SAMPLER] = _node(
        "KSampler",
        model=model,
        positive=["scene", 0],
        negative=["scene", 1],
        latent_image=["empty", 0],
        seed=seed,
        steps=steps,
        denoise=1.0,
        **kind.sampling,
    )
    graph["decode"] = _node("ToMADemoDecode", samples=[SAMPLER, 0], scale=PICTURE_SCALE)
    graph[PICTURE] = _node("PreviewImage", images=["decode", 0])
    graph[LATENT] = _node("SaveLatent", samples=[SAMPLER, 0], filename_prefix="demo")
    if merged:
        graph[REPORT] = _node("ToMAReport", model=model, latent=[SAMPLER, 0], image=["decode", 0])
    return graph


def widget_values(ratio: float = RATIO, **chosen: Any) -> dict[str, Any]:
    """Return the values of every widget of ToMA Advanced: the balanced preset, and the fields of `ToMAConfig` in
    `chosen`."""
    values: dict[str, Any] = {"preset": "balanced", "ratio": ratio, "profile": ""}
    for item in fields(ToMAConfig):
        if setting_spec(item.name).internal:
            continue
        left_alone = "preset" if isinstance(item.default, (bool, Enum)) else -1
        values.setdefault(item.name, left_alone)
    switches = {name: "on" if value else "off" for name, value in chosen.items() if isinstance(value, bool)}
    return {**values, **chosen, **switches}


def place_dit(models: Path) -> None:
    """Write the Flux-format checkpoint in float16 to the folder of ComfyUI's own loader. The weights are the trained
    ones, which the repository has in 8 bits. If they are missing, the weights are random. `models`: the server's models
    folder."""
    target = models / "diffusion_models" / DIT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    if DIT.trained:
        trained = load_weights(WEIGHTS_FOLDER / "dit.safetensors")
        save_file({name: value.half().contiguous() for name, value in trained.items()}, target)
        return
    from .comfy_setup import prepare

    prepare()  # the network is ComfyUI's own class; only this function needs ComfyUI in this process
    from .models import new_dit

    save_file({name: value.contiguous() for name, value in new_dit(to_train=False).state_dict().items()}, target)


def _loader(kind: Kind) -> dict[str, Any]:
    if kind is DIT:
        return _node("UNETLoader", unet_name=DIT_FILE, weight_dtype="default")
    return _node("ToMADemoUNet", weights="trained" if kind.trained else "random", seed=0)


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}
