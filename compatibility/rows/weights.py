"""Features that change a model's weights."""

from __future__ import annotations

from torch import Tensor

from ..kit import Kit, node, random
from ..row import CHEAP, FOR_UNETS, MERGED, Graph
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
    """Patch the layers on the text (48 wide) and on the finer resolution (64 wide): keys and values are no longer one
    tensor."""

    def layer(width: int) -> dict[str, Tensor]:
        return {"linear.weight": random(width, width, scale=0.05), "linear.bias": random(width, scale=0.1)}

    name = kit.file("hypernetworks", "style.pt", {width: [layer(width), layer(width)] for width in (48, 64)})
    load = node("nodes_hypernetwork.HypernetworkLoader")
    return Graph(lambda m: load(m, name, 1.0))
