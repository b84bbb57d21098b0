"""Features that change a model's weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kit import AbsentError, Kit, node, random
from ..row import CHEAP, FOR_UNETS, MERGED, NOT_TRIED, OTHERS, Graph
from .table import row

GROUP = "Weights"


@row(GROUP, "LoRA", others=MERGED, quick=True, sound=True)
def lora(kit: Kit) -> Graph:
    name = kit.file("loras", "style.safetensors", kit.lora())
    load = node("nodes.LoraLoaderModelOnly")
    return Graph(lambda m: load(m, name, 1.0), without=Graph(lambda m: load(m, name, 0.0)), off=True)


@row(GROUP, "Several LoRAs, one of them negative")
def loras(kit: Kit) -> Graph:
    load, names = (
        node("nodes.LoraLoaderModelOnly"),
        [kit.file("loras", f"{seed}.safetensors", kit.lora(seed)) for seed in (7, 9)],
    )
    return Graph(lambda m: load(load(m, names[0], 0.8), names[1], -0.6))


@row(GROUP, "LoRA as a hook on conditioning, with keyframes", others=CHEAP, quick=True)
def lora_hooks(kit: Kit) -> Graph:
    """Apply a LoRA to the positive prompt only, with a strength that falls during the run."""
    name = kit.file("loras", "style.safetensors", kit.lora())
    hooks = node("nodes_hooks.CreateHookLoraModelOnly")(name, 1.0)
    frames = node("nodes_hooks.CreateHookKeyframe")(1.0, 0.0)
    frames = node("nodes_hooks.CreateHookKeyframe")(0.5, 0.5, frames)
    hooks = node("nodes_hooks.SetHookKeyframes")(hooks, frames)
    positive = node("nodes_hooks.ConditioningSetProperties")(kit.prompt(1), 1.0, "default", hooks=hooks)
    return Graph(sample=lambda m: kit.sample(m, positive=positive))


@row(
    GROUP,
    "int8 weights (int8_tensorwise, without and with convrot)",
    others={**dict.fromkeys(OTHERS, NOT_TRIED), "qwen_image21": MERGED, "h3": MERGED},
)
def int8(kit: Kit) -> Iterator[Graph]:
    """Quantise weights in ComfyUI's format, and load them into ComfyUI's layers, which compute in eight bits."""
    for rotated in (False, True):
        yield Graph(model=_quantised(kit, rotated), steered=False, name="convrot" if rotated else "plain")


def _quantised(kit: Kit, rotated: bool) -> Any:
    from comfy.model_patcher import ModelPatcher
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    kind = "int8_tensorwise"
    if kind not in QUANT_ALGOS:
        raise AbsentError(f"this ComfyUI has no {kind}")
    layout, group = QUANT_ALGOS[kind]["comfy_tensor_layout"], 4
    written = {"format": kind, **({"convrot": True, "convrot_groupsize": group} if rotated else {})}
    mark = torch.tensor(list(json.dumps(written).encode()), dtype=torch.uint8)
    source = kit.build()
    weights = source.model.diffusion_model.state_dict()
    for name in kit.block_weights(source):
        made = QuantizedTensor.from_float(
            weights.pop(name), layout, per_channel=True, convrot=rotated, convrot_groupsize=group
        )
        weights |= {**made.state_dict(name), f"{name.removesuffix('weight')}comfy_quant": mark}
    config, cpu = source.model.model_config, torch.device("cpu")
    config.quant_config = {"mixed_ops": True}
    config.set_inference_dtype(torch.float32, torch.float32)
    model = type(source.model)(config, device=cpu)
    model.load_model_weights(weights)
    loaded = ModelPatcher(model.eval(), load_device=cpu, offload_device=cpu)
    loaded.model_options = source.model_options
    return loaded


@row(GROUP, "Model merging")
def merging(kit: Kit) -> Graph:
    merge = node("nodes_model_merging.ModelMergeSimple")
    return Graph(lambda m: merge(m, kit.other_model, 0.7))


@row(GROUP, "Attention multipliers (UNetSelfAttentionMultiply, UNetCrossAttentionMultiply)", flux=FOR_UNETS)
def multipliers(kit: Kit) -> Graph:
    own = node("nodes_attention_multiply.UNetSelfAttentionMultiply")
    cross = node("nodes_attention_multiply.UNetCrossAttentionMultiply")
    return Graph(lambda m: cross(own(m, 1.2, 0.9, 1.1, 0.8), 1.1, 1.0, 1.2, 1.3))


@row(GROUP, "Hypernetwork", flux=FOR_UNETS)
def hypernetwork(kit: Kit) -> Graph:
    """Patch the layers that read the text (48 wide) and those at the finer resolution (64 wide). Keys and values then
    come from different tensors."""

    def layer(width: int) -> dict[str, Tensor]:
        return {"linear.weight": random(width, width, scale=0.05), "linear.bias": random(width, scale=0.1)}

    name = kit.file("hypernetworks", "style.pt", {width: [layer(width), layer(width)] for width in (48, 64)})
    load = node("nodes_hypernetwork.HypernetworkLoader")
    return Graph(lambda m: load(m, name, 1.0))
