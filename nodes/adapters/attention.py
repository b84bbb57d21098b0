"""Which attention computes, in words for the report: what the model's own blocks call, not what was asked for.

ComfyUI chooses once, at start. Flux keeps a name of its own for that choice, other packs put a function of theirs in
one place or the other, and where FlashAttention or SageAttention refuse what they are given, ComfyUI lets PyTorch's
attention compute it. Nothing here computes or changes attention: merged tokens go to the one that whole tokens go to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...toma_core.payoff import card_of

# The classes whose `forward` calls attention: of UNets, Flux and Chroma, NextDiT, Krea 2 and Qwen-Image, SD3, ERNIE,
# Wan.
_CALLERS = (
    *("CrossAttention", "DoubleStreamBlock", "JointAttention", "Attention", "JointBlock", "ErnieImageAttention"),
    "WanSelfAttention",
)
# What they call it.
_NAMES = ("optimized_attention", "optimized_attention_masked")
# ComfyUI's own functions are there; the other is what Flux calls, which calls them.
_OWN, _FLUX = "comfy.ldm.modules.attention", "comfy.ldm.flux.math"
# The widest heads that a library takes, by its own checks (flash-attn 2.8, sageattention 1.0.6 and 2.2).
_WIDEST = {"flash": 256, "sage": 128}


def attention_in_use(model: ModelPatcher, transformer_options: dict[str, Any]) -> str:
    """What computes attention in this model, on merged tokens too; "unknown" where nobody can tell. Never raises: what
    is only told must not cost a run."""
    try:
        name = _in_use(model)
        override = transformer_options.get("optimized_attention_override")
        return name if override is None else f"{name}, overridden by {_pack(_home(override))}"
    except Exception:
        return "unknown"


def _in_use(model: ModelPatcher) -> str:
    callers = [m for m in model.model.diffusion_model.modules() if type(m).__name__ in _CALLERS]
    function = _called(callers[0].forward)
    name = str(getattr(function, "__name__", type(function).__name__))
    if _home(function) != _OWN:
        return f"{name} of {_pack(_home(function))}"
    name = name.removeprefix("attention_")
    return _computed(name, model, max(map(_width, callers))) if name in _WIDEST else name


def dtype_of(model: ModelPatcher) -> torch.dtype:
    """Return the dtype that a run of the model computes in, also before ComfyUI applies its object patches, as
    ModelComputeDtype makes them."""
    dtype: torch.dtype = model.get_model_object("manual_cast_dtype") or model.model.get_dtype()
    return dtype


def _called(forward: Callable[..., Any]) -> Any:
    """What a block's `forward` calls for its attention; itself if another pack has replaced it."""
    names = getattr(forward, "__globals__", {})
    if not str(names.get("__name__")).startswith("comfy."):
        return forward
    for name in _NAMES:
        if name in names:
            return names[name]
    function = names["attention"]
    return function.__globals__["optimized_attention"] if _home(function) == _FLUX else function


def _computed(name: str, model: ModelPatcher, width: int) -> str:
    """Flash or sage, or PyTorch's attention where ComfyUI lets that compute instead. width: of the widest heads."""
    device, dtype = torch.device(model.load_device), dtype_of(model)
    card, refuses = card_of(device), ""
    if device.type != "cuda":
        refuses = "needs a GPU"
    elif card is not None and dtype not in (torch.float16, torch.bfloat16):
        refuses = f"takes no {str(dtype).removeprefix('torch.')}"
    elif card is not None and card.capability < (8, 0) and name == "flash":
        refuses = "takes no card of this age"
    if refuses:
        return f"pytorch (in place of {name}, which {refuses})"
    instead = ["a mask"] if name == "flash" else []
    if width > _WIDEST[name]:
        instead.append(f"heads wider than {_WIDEST[name]}")
    return f"{name} (pytorch for {' and '.join(instead)})" if instead else name


def _width(caller: nn.Module) -> int:
    """Channels of one head."""
    attention: Any = getattr(getattr(caller, "x_block", None), "attn", caller)
    for name in ("dim_head", "head_dim", "headdim"):
        if hasattr(attention, name):
            return int(getattr(attention, name))
    return int(attention.hidden_size // attention.num_heads)


def _home(function: Any) -> str:
    """The module a function was written in: `functools.wraps` makes it say another."""
    names = getattr(function, "__globals__", {})
    return str(names.get("__name__") or getattr(function, "__module__", None) or type(function).__module__)


def _pack(module: str) -> str:
    """The module's name without where ComfyUI lies: it loads packs under their path."""
    return module.replace("\\", ".").replace("/", ".").rpartition("custom_nodes.")[2]
