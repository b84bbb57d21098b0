"""Compare every attention that ComfyUI offers on this machine in one process, alone and with ToMA.

ComfyUI chooses one at start (`--use-flash-attention`, `--use-sage-attention`, ...), but registers all that can be
imported by name, and an override, as packs use it, replaces ComfyUI's choice for one model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import bench, forward, variants
from benchmarks.bench import Row
from benchmarks.variants import Variant
from testbed.fullsize import Shape

# Labels of names that need one.
NOTES = {"sage3": "takes more than 1024 tokens, merged ones too: the rest is PyTorch's"}
# Tokens of the trial: more than the minimum of `sage3`.
_TRIAL = 2048


def variant(name: str, function: Callable[..., Tensor]) -> Variant:
    """Return a variant with this attention instead of ComfyUI's choice."""

    def patch(model: Any) -> Any:
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = chosen
        return model

    def chosen(_: Any, *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    return Variant(f"{name} attention", patch, NOTES.get(name, ""))


@contextmanager
def _stepping_in() -> Iterator[list[str]]:
    """Yield a list that grows when ComfyUI falls back to PyTorch's attention for a library that refuses its inputs."""
    import comfy.ldm.modules.attention as own

    called: list[str] = []

    def seen(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def instead(*args: Any, **kwargs: Any) -> Tensor:
            called.append("pytorch")
            return function(*args, **kwargs)

        return instead

    torch_own = torch.nn.functional.scaled_dot_product_attention
    with (
        mock.patch.object(own, "attention_pytorch", seen(own.attention_pytorch)),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", seen(torch_own)),
    ):
        yield called


def refusal(name: str, function: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Return why the named attention would not compute such tokens with heads of this width; empty if it does."""
    q, k, v = torch.randn(3, 1, 2, _TRIAL, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        with _stepping_in() as called:
            function(q, k, v, 2, skip_reshape=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    kind = str(dtype).removeprefix("torch.")
    return f"PyTorch's computes in its place ({kind}, heads of {width})" if called and name != "pytorch" else ""


def here(device: torch.device, dtype: torch.dtype, width: int) -> tuple[list[Variant], list[str]]:
    """Return a variant for each attention that ComfyUI can call here, and a note for each that refuses such tokens,
    because its row would time another attention."""
    import comfy.ldm.modules.attention as own

    offered, notes = [], []
    for name, function in own.REGISTERED_ATTENTION_FUNCTIONS.items():
        why = refusal(name, function, device, dtype, width)
        if why:
            notes.append(f"{name} attention: left out, {why}")
        else:
            offered.append(variant(name, function))
    return offered, notes


def measure(
    patcher: Any, shape: Shape, merged: Variant, dtype: torch.dtype, device: torch.device, repeats: int, limit: float
) -> tuple[list[Row], list[str]]:
    """Return rows of one evaluation (ComfyUI's choice, each attention alone and with `merged`), and notes."""
    network = patcher.model.diffusion_model
    width = network.hidden_size // network.num_heads if hasattr(network, "hidden_size") else 64
    offered, notes = here(device, dtype, width)
    bench.say(f"{shape.model}: {', '.join(v.name for v in offered)}")
    chosen = [merged, *(v for each in offered for v in (each, variants.stacked(each, merged)))]
    return forward.measure(patcher, shape, chosen, repeats, device, "attention", limit=limit), notes
