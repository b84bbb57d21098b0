"""Merged blocks use the attention that the user or the checkpoint chose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfy.ldm.modules.attention import attention_basic
from torch import Tensor, nn

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.kv_helpers import overridden

report_text = pack_module("nodes.adapters.report_text")
# For each kind of model: the module of ComfyUI that calls attention, the names of a block's attentions in the order of
# their calls, and the size of the latent.
KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "h3": ("comfy.ldm.minimax.model", ("attn",), {"height": 12, "width": 16, "frames": 5}),
    "z_image": ("comfy.ldm.lumina.model", ("attention",), {"height": 20, "width": 28}),
    "wan": ("comfy.ldm.wan.model", ("self_attn", "cross_attn"), {"height": 20, "width": 28, "frames": 3}),
}
STEPS = 6


def sampled(kind: str, model: Any) -> Tensor:
    return models.sample(model, **KINDS[kind][2], steps=STEPS, cfg=1.0)


def blocks_of(model: Any) -> Any:
    network = model.model.diffusion_model
    return getattr(network, "blocks", None) or network.layers


def lengths(q: Any, k: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of queries and keys in a call of attention."""
    axis = 2 if kwargs.get("skip_reshape") else 1
    return getattr(q, "tensor", q).shape[axis], getattr(k, "tensor", k).shape[axis]


class Preference(nn.Module):
    """Stands in for the `ComfyAttention` of ComfyUI after 0.33, which the model passes to `optimized_attention`."""

    function: Callable[..., Any] | None = None


@pytest.fixture
def naming(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, int]]]:
    """naming(kind, model, names): let the checkpoint choose a function for the attentions with these names, in all
    blocks except the last. Return a list that gets (number of queries, number of keys) at each call of the function."""

    def start(kind: str, model: Any, names: tuple[str, ...]) -> list[tuple[int, int]]:
        module, attentions, _ = KINDS[kind]
        home = pytest.importorskip(module)
        entry = "optimized_attention" if hasattr(home, "optimized_attention") else "optimized_attention_masked"
        calls, current, default = list[tuple[int, int]](), list[nn.Module](), getattr(home, entry)

        def named(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(lengths(q, k, kwargs))
            return default(q, k, v, *args, **{**kwargs, "transformer_options": {}})

        def chosen(*args: Any, **kwargs: Any) -> Any:
            preference = getattr(current[-1], "comfy_attention", None) if current else None
            overridden = "optimized_attention_override" in (kwargs.get("transformer_options") or {})
            known = preference is None or preference.function is None or overridden
            return default(*args, **kwargs) if known else preference.function(*args, **kwargs)

        def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
            def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                current.append(self)
                try:
                    return forward(self, *args, **kwargs)
                finally:
                    current.pop()

            return noted

        *blocks, last = blocks_of(model)
        for block in (*blocks, last):
            for name in attentions:
                preference = Preference()
                preference.function = named if name in names and block is not last else None
                getattr(block, name).comfy_attention = preference
        for owner in {type(getattr(last, name)) for name in attentions}:
            monkeypatch.setattr(owner, "forward", noting(owner.forward))
        monkeypatch.setattr(home, entry, chosen)
        return calls

    return start


CHOICES = [
    (kind, names) for kind, (_, each, _) in KINDS.items() for names in dict.fromkeys((each[:1], each[-1:], each))
]


@loop(("kind", "names"), CHOICES)
def test_the_attention_that_the_checkpoint_names(kind: str, names: tuple[str, ...], naming: Any, stats_of: Any) -> None:
    plain = sampled(kind, balanced(getattr(models, kind)()))
    model = getattr(models, kind)()
    calls, merged = naming(kind, model, names), balanced(model)
    sampled(kind, model)
    expected = len(calls)
    assert expected == STEPS * len(names) * (len(blocks_of(model)) - 1)
    calls.clear()
    assert torch.equal(sampled(kind, merged), plain)
    assert len(stats_of(merged).merged_steps) == 3
    assert len(calls) == expected
    assert (KINDS[kind][1][0] in names) is any(a < b for a, b in calls)


class Override:
    """An attention override of another node. Records (number of queries, number of keys) of each call. leaves(these two
    numbers): return whether the override leaves the call to ComfyUI."""

    def __init__(self, leaves: Callable[[int, int], bool]) -> None:
        self.leaves, self.calls = leaves, list[tuple[int, int]]()

    def __call__(self, function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(lengths(q, k, kwargs))
        return (function if self.leaves(*self.calls[-1]) else attention_basic)(q, k, v, *args, **kwargs)


def by_node(model: Any, override: Override) -> Any:
    """Make `override` the model's attention, with the method that ComfyUI's node `ModelAttentionBackend` calls."""
    model = model.clone()
    if not hasattr(model, "set_model_optimized_attention"):
        pytest.skip("this ComfyUI has no such method")

    def backend(*args: Any, **kwargs: Any) -> Any:
        return override(None, *args, **kwargs)

    backend.container_function = backend  # type: ignore[attr-defined]
    model.set_model_optimized_attention(backend)
    return model


@loop("kind", KINDS)
@loop(
    ("chosen", "leaves", "said"),
    [
        (overridden, lambda a, b: False, False),  # an attention for all calls, as Sage
        (by_node, lambda a, b: False, False),
        (overridden, lambda a, b: True, False),  # one that only looks on
        (overridden, lambda a, b: a != b, True),  # a sparse one that needs as many queries as keys
    ],
    ids=["all", "node", "onlooker", "sparse"],
)
def test_the_attention_of_another_node(
    kind: str, chosen: Any, leaves: Any, said: bool, model_of: Any, stats_of: Any
) -> None:
    """If another node's override leaves only calls of merged blocks to ComfyUI's attention, the report says so."""
    override = Override(leaves)
    model = chosen(model_of(kind), override)
    sampled(kind, model)
    expected = len(override.calls)
    override.calls.clear()
    merged = balanced(model)
    sampled(kind, merged)
    assert len(stats_of(merged).merged_steps) == 3
    assert len(override.calls) == expected
    assert any(a < b for a, b in override.calls)
    assert (report_text.Line.ATTENTION_LEFT() in report_text.details(stats_of(merged))) is said
    assert stats_of(merged).unmerged_calls == {}


@loop("kind", KINDS)
def test_an_override_comes_before_the_checkpoint(kind: str, naming: Any) -> None:
    model, override = getattr(models, kind)(), Override(lambda *_: False)
    calls = naming(kind, model, KINDS[kind][1])
    sampled(kind, balanced(overridden(model, override)))
    assert override.calls
    assert not calls
