"""The token layout in transformer_options, which other nodes' attention reads, matches the tokens of every block."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import every_kind, prompts_of
from tests.nodes.adapters.kv_helpers import overridden

GRANULARITIES = ["stack", "block", "module"]
SIDE = 24  # UNet: grids of 12 x 12 and 6 x 6
TEXT, IMAGE, REFERENCES = 7, 144, (48, 12)  # Flux: a grid of 12 x 12


def listening(model: Any) -> tuple[Any, list[Any]]:
    """Return a clone with an attention override, and a list of the override's calls. Each call has `length`, its number
    of queries, and `options`, a copy of transformer_options."""
    calls = list[Any]()

    def override(func: Any, q: Tensor, *args: Any, transformer_options: Any, **kwargs: Any) -> Tensor:
        length = q.shape[2 if kwargs.get("skip_reshape") else 1]
        calls.append(SimpleNamespace(length=length, options=dict(transformer_options)))
        return func(q, *args, transformer_options=transformer_options, **kwargs)

    return overridden(model, override), calls


@pytest.mark.compat
@loop("granularity", GRANULARITIES)
@loop("settings", [{}, {"skip_last_blocks": 3}], ids=["all", "some"])
def test_the_grid_fits_the_tokens_in_a_unet(unet: Any, attach: Any, granularity: str, settings: dict[str, Any]) -> None:
    """In calls on D destinations, `activations_shape` is (B, C, 1, D). In calls on all tokens, it is ComfyUI's own
    shape."""
    plain, before = listening(unet)
    models.sample(plain, SIDE, SIDE, steps=2)
    foreign, calls = listening(unet)
    models.sample(attach(foreign, granularity=granularity, end_percent=0.5, **settings), SIDE, SIDE, steps=2)
    merged = 0
    for call, same in zip(calls, before, strict=True):
        full, shape = same.options["activations_shape"], call.options["activations_shape"]
        assert same.length == full[-2] * full[-1]
        assert shape == (full if call.length == same.length else [*full[:2], 1, call.length])
        for name in ("block", "block_index", "transformer_index", "original_shape"):
            assert call.options[name] == same.options[name]
        merged += call.length < same.length
    assert merged == len(calls) // 2 if not settings else 0 < merged < len(calls) // 2


@pytest.mark.compat
@loop("granularity", GRANULARITIES)
@loop("full_step_interval", [0, 2])
@loop("with_references", [False, True])
def test_flux_img_slice(
    flux: Any, attach: Any, granularity: str, full_step_interval: int, with_references: bool
) -> None:
    """In single blocks `img_slice` is [T, T + D + R], with T text tokens, D destinations and R tokens of references."""
    foreign, calls = listening(flux)
    settings = {"granularity": granularity, "full_step_interval": full_step_interval, "skip_first_blocks": 1}
    latents = [torch.ones(1, 16, *size) for size in ((12, 16), (8, 6))]  # 48 and 12 tokens
    conds = prompts_of(flux, reference_latents=latents) if with_references else {}
    models.sample(attach(foreign, **settings), SIDE, SIDE, steps=4, **conds)
    extra = sum(REFERENCES) if with_references else 0
    lengths = set()
    for call in calls:
        single = call.options["block_type"] == "single"
        assert call.options.get("img_slice") == ([TEXT, call.length] if single else None)
        if extra and "reference_image_num_tokens" in call.options:  # not in ComfyUI 0.16.3
            assert call.options["reference_image_num_tokens"] == list(REFERENCES)
        lengths.add((call.options["block_type"], call.length - TEXT - extra))
    assert lengths == {(kind, n) for kind in ("double", "single") for n in (IMAGE, IMAGE // 2)}


@every_kind
@loop("granularity", GRANULARITIES)
def test_attention_patches_receive_all_tokens(model: Any, attach: Any, kind: str, granularity: str) -> None:
    model, pairs = model.clone(), []

    def look(tokens: Tensor, *given: Any) -> Any:
        *rest, options = given
        grid = options.get("activations_shape", (0, 0))[-2:]
        pairs.append((tokens.shape[1], grid[0] * grid[1] if kind == "unet" else options["img_slice"][1]))
        return (tokens, *rest) if rest else tokens

    names = ("attn1_patch", "attn1_output_patch", "attn2_patch", "attn2_output_patch", "middle_patch")
    for name in names if kind == "unet" else ["attn1_output_patch"]:
        model.set_model_patch(look, name)
    models.sample(attach(model, granularity=granularity), SIDE, SIDE, steps=1)
    assert pairs
    assert all(length == said for length, said in pairs)
    assert {length for length, _ in pairs} == ({144, 36} if kind == "unet" else {TEXT + IMAGE})


@loop("kind", ["unet", "flux"])
@loop("granularity", GRANULARITIES)
def test_the_callers_options_stay_as_they_are(attach: Any, kind: str, granularity: str) -> None:
    """Attention gets the layout of merged tokens, but the options that the caller passed are unchanged. ComfyUI passes
    no `img_slice` to double blocks, but another node may."""
    model, place = getattr(models, kind)(), [TEXT, TEXT + IMAGE]
    foreign, calls = listening(model)
    foreign.model_options["transformer_options"]["mine"] = {"nested": [1]}
    before: dict[str, Any] = {}
    differing, lengths = set[str](), set[int]()

    def enters(_: Any, args: Any, kwargs: Any) -> None:
        kwargs["transformer_options"].update({"img_slice": place} if kind == "flux" else {})
        calls.clear()
        before.clear()
        before.update(kwargs["transformer_options"])

    def leaves(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        assert kwargs["transformer_options"] == before
        assert calls
        for call in calls:
            assert call.options.keys() == before.keys()
            differing.update(name for name, value in before.items() if call.options[name] is not value)
            assert kind == "unet" or call.options["img_slice"] == [TEXT, call.length]
            lengths.add(call.length)

    names = ("BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock")
    for block in [m for m in model.model.diffusion_model.modules() if type(m).__name__ in names]:
        block.register_forward_pre_hook(enters, with_kwargs=True)
        block.register_forward_hook(leaves, with_kwargs=True)
    models.sample(attach(foreign, granularity=granularity), SIDE, SIDE, steps=2)
    assert "mine" in before
    assert differing == {"activations_shape" if kind == "unet" else "img_slice"}
    assert place == [TEXT, TEXT + IMAGE]
    assert kind == "unet" or lengths == {TEXT + IMAGE // 2}
