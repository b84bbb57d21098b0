"""Test reference images whose tokens follow the generated image: they stay unmerged, or have separate plans."""

import inspect
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, LAYOUTS, WIDTH, Layout, current, grid_of, noise, of_references
from tests.nodes.adapters.helpers import prompts_of

report_text = pack_module("nodes.adapters.report_text")

REFERENCES = [("flux", None), ("flux2", None), ("flux2", "index_timestep_zero"), ("qwen_image", None)]
REFERENCES += [("qwen_image", "index_timestep_zero"), ("krea2", "index"), ("krea2", "index_timestep_zero")]


@pytest.mark.compat
@loop(("family", "method", "layout"), [(f, method, layout) for f, method in REFERENCES for layout in LAYOUTS[f]])
@loop("too", [False, True], ids=["unmerged", "merged"])
def test_references(
    family: str, method: str | None, layout: Layout, too: bool, model_of: Any, merged_block: Any
) -> None:
    """With `index_timestep_zero`, blocks receive the index of the first reference token. Merging lowers this index by
    the number of tokens removed before that token."""
    model = model_of(family)
    taken = inspect.signature(type(model.model.diffusion_model).forward).parameters
    if family == "krea2" and "ref_latents" not in taken:
        pytest.skip("this ComfyUI has no references for Krea 2")
    conds = {"positive": models.conditioning(model, seed=1, **of_references(model, method))}
    block = merged_block(model, layout, references=too, **conds)
    assert block.stats.times_less_work is None, "tokens of references are not counted"
    given = block.given
    num_tokens = given["transformer_options"].get("reference_image_num_tokens")
    assert num_tokens or not current()
    sizes = [(side // layout.patch) * (12 // layout.patch) for side in (8, 6)]
    assert block.tokens.shape[1] == layout.before + block.plan.tokens + sum(sizes)
    plans = [block.plan]
    if too and num_tokens:  # without the number of their tokens (ComfyUI 0.16.3), references stay unmerged
        block.merge(3)
        plans = [each.plan for each in block.planned[:3]]
        assert [plan.tokens for plan in plans[1:]] == sizes

    def moved(offset: int) -> int:
        end, gone = layout.before, 0
        for plan in plans:
            end += plan.tokens
            gone += plan.tokens - plan.num_destinations if offset >= end else 0
        return offset - gone

    if given.get("timestep_zero_index") is not None:
        block.seen["timestep_zero_index"] = moved(given["timestep_zero_index"])
    for name in ("modulation_dims_img", "modulation_dims"):
        if given.get(name) is not None:
            block.seen[name] = [(moved(first), moved(last), which) for first, last, which in given[name]]
    block.agrees()


@loop("family", ["flux", "flux2", "krea2", "qwen_image"])
def test_merged_references_in_complete_runs(family: str, model_of: Any, attach: Any, plan_calls: Any) -> None:
    """Each reference of a condition has one plan, which all calls and blocks of the run use."""
    model = model_of(family)
    options = of_references(model, "index" if family == "krea2" else None)
    conds = prompts_of(model, **options)
    settings = {"merge_references": True, "selection_interval": 1, "weight_interval": 1}
    out = models.sample(attach(model, **settings), HEIGHT, WIDTH, batch=2, steps=3, **conds)
    assert out.isfinite().all()
    references = {call.grid for call in plan_calls} - {grid_of(LAYOUTS[family][0])}
    assert len(references) == 2
    made: dict[Any, set[int]] = {}
    for call in plan_calls:
        if call.grid in references:
            made.setdefault((call.grid, call.scope), set()).add(id(call.plan))
    assert {len(plans) for plans in made.values()} == {1}
    plain = models.sample(model, HEIGHT, WIDTH, batch=2, steps=3, **conds)
    far = (out - plain).norm()
    settings |= {"full_step_interval": 2}
    assert (models.sample(attach(model, **settings), HEIGHT, WIDTH, batch=2, steps=3, **conds) - plain).norm() < far


@loop("family", ["flux", "qwen_image"])
def test_reference_as_large_as_the_image(
    family: str, model_of: Any, attach: Any, plan_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference keeps one plan for the whole run. In every step the image gets a new plan, which both conditions
    share."""
    model = model_of(family)
    frames = (1,) if family == "qwen_image" else ()
    options = {"reference_latents": [noise(1, model.model.latent_format.latent_channels, *frames, HEIGHT, WIDTH)]}
    conds = prompts_of(model, **options)
    # The selector `grid` gives fixed destinations. With the usual search, rounding in split calls could change which
    # tokens are selected.
    settings = {"merge_references": True, "selection_interval": 1, "weight_interval": 1, "selector": "grid"}
    joined = models.sample(attach(model, **settings), HEIGHT, WIDTH, steps=3, **conds)
    plan_calls.clear()
    monkeypatch.setattr(type(model.model), "memory_required", lambda *_, **__: 1e20)
    split = models.sample(attach(model, **settings), HEIGHT, WIDTH, steps=3, **conds)
    torch.testing.assert_close(split, joined, rtol=1e-3, atol=1e-3)
    made: dict[Any, set[int]] = {}
    for call in plan_calls:
        made.setdefault((call.scope, call.step_plan.selection, call.copies), set()).add(id(call.plan))
    assert {len(plans) for plans in made.values()} == {1}
    assert {selection for _, selection, _ in made} == {0, 1, 2, pack_module("toma_core.schedule").LASTING}


@loop("cached", [False, True])
@loop("least", [20, 30])
def test_each_reference_is_merged_that_can_be(
    model_of: Any, attach: Any, plan_calls: Any, stats_of: Any, least: int, cached: bool
) -> None:
    """The references have 24 and 18 tokens, in either order. A reference with fewer than `least` tokens is not merged,
    and the report names it."""
    model = model_of("flux")
    options = of_references(model)
    settings = {"full_step_interval": 3, "kv_cache": True} if cached else {}
    for order in (1, -1):
        references = options["reference_latents"][::order]
        conds = {"positive": models.conditioning(model, seed=1, **{**options, "reference_latents": references})}
        merged = attach(model, merge_references=True, min_tokens=least, **settings)
        plan_calls.clear()
        assert models.sample(merged, HEIGHT, WIDTH, steps=5, cfg=1.0, **conds).isfinite().all()
        sizes = sorted(h * w for h, w in {call.grid for call in plan_calls} - {(10, 14)})
        assert sizes == ([24] if least == 20 else [])
        unmerged = {
            name for names in stats_of(merged).unmerged_names().values() for name in names if "reference" in name
        }
        small = "reference 2" if order == 1 else "reference 1"
        assert unmerged == ({small} if least == 20 else {"reference 1", "reference 2"})
        assert small in report_text.summary(stats_of(merged))


@loop("family", ["z_image", "omnigen2"])
@loop("too", [False, True])
def test_references_before_the_image(family: str, too: bool, run_merged: Any) -> None:
    """In Z-Image Omni and OmniGen2, references come before the image and are never merged."""
    model = models.TRANSFORMERS[family]()
    conds = {"positive": models.conditioning(model, seed=1, **of_references(model))}
    assert set(run_merged(model, {"merge_references": too}, steps=2, cfg=1.0, **conds).grids) == {(10, 14)}
