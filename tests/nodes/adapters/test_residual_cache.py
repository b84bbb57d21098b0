"""Test the residual cache on ComfyUI's blocks."""

from typing import Any

import comfy.samplers
import pytest
import torch
from comfy.model_patcher import set_model_options_patch_replace

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import Control, split_calls

report_text = pack_module("nodes.adapters.report_text")

SIDE = 24
REUSE = {"full_step_interval": 2, "kv_cache": True}
# Batches of different sizes round differently. Sharp weights would amplify the difference for tokens with two nearly
# equal destinations, so use soft weights.
SMOOTH = {"selector": "grid", "sharpness": 20.0}
# Options that run the first step, or the first two steps, of a schedule of three steps. The last step, which is never
# merged, is not run.
FIRST = {1: {"steps": 3, "last_step": 1}, 2: {"steps": 3, "last_step": 2}}


@pytest.mark.compat
@loop("granularity", ["block", "stack"])
def test_a_full_step_is_unmerged(flux: Any, attach: Any, stats_of: Any, granularity: str, no_state_left: None) -> None:
    """A full step equals a step of the model without ToMA, although hooks cache its updates. The next step is
    merged."""
    patched = attach(flux, **REUSE, granularity=granularity)
    assert torch.equal(models.sample(patched, SIDE, SIDE, **FIRST[1]), models.sample(flux, SIDE, SIDE, **FIRST[1]))
    stats = stats_of(patched)
    assert (stats.merged_blocks, stats.merged_steps) == (set(), {})
    assert stats.cache_bytes > 0
    assert not torch.equal(*(models.sample(m, SIDE, SIDE, **FIRST[2]) for m in (flux, patched)))
    assert stats_of(patched).merged_steps == {1: 0.5}
    assert stats_of(patched).merged_blocks == stats_of(patched).blocks != set()


@pytest.mark.compat
@loop("areas", [False, True])
def test_joined_and_split_calls_agree(flux: Any, attach: Any, monkeypatch: Any, areas: bool) -> None:
    halves = [{"area": (SIDE, SIDE // 2, 0, left)} if areas else {} for left in (0, SIDE // 2)]
    positive = [models.conditioning(flux, seed=seed, **half)[0] for seed, half in zip((1, 3), halves, strict=True)]
    patched = attach(flux, **REUSE, **SMOOTH)
    joined = models.sample(patched, SIDE, SIDE, **FIRST[2], positive=positive)
    split_calls(monkeypatch, flux)
    split = models.sample(patched, SIDE, SIDE, **FIRST[2], positive=positive)
    assert (split - joined).norm() < 0.01 * joined.norm()


def test_calls_are_distinguished_by_their_patches_not_only_by_order() -> None:
    """If two guidances perturb the model and the first guidance ends, the second guidance still finds its cache."""
    config = pack_module("toma_core.config").ToMAConfig()
    sampling = pack_module("nodes.adapters.patch_model").SamplingRun.start(config, None, [2.0, 1.0, 0.0])

    def call(sigma: float, layer: int | None = None) -> Any:
        replaced = {} if layer is None else {"dit": {("single_block", layer): lambda args, extra: args}}
        given = {"transformer_options": {"patches_replace": replaced, "patches": {"attn1_patch": [print]}}}
        sampling.observe(torch.tensor([sigma]), model_options=given)
        return sampling.cond_keys(1, {"uuids": ["cond"]})

    plain, first, second = call(2.0), call(2.0, 1), call(2.0, 2)
    assert [call(1.0), call(1.0, 2)] == [plain, second]
    assert len({plain, first, second}) == 3


def test_a_control_that_ends_takes_the_chains_it_split_with_it(flux: Any, attach: Any, stats_of: Any) -> None:
    """When the ControlNet ends, two short chains become one long chain. This chain has no cached residual, so the step
    is full."""
    residuals = {"input": [torch.zeros(1, 1, 48)] * 3, "output": []}
    control = Control(lambda x, t: residuals if float(t[0]) == 1 else None)
    positive = models.conditioning(flux, seed=1, control=control, control_apply_to_uncond=True)
    patched = attach(flux, **REUSE)
    out = models.sample(patched, SIDE, SIDE, **FIRST[2], cfg=1.0, positive=positive)
    stats = stats_of(patched)
    assert (stats.evaluations, stats.merged_in.total()) == (2, 0)
    assert "nothing cached yet" in str(report_text.headline(stats))
    assert torch.equal(out, models.sample(flux, SIDE, SIDE, **FIRST[2], cfg=1.0, positive=positive))


@loop("patched", [True, False])
def test_guidance_that_begins_late(flux: Any, attach: Any, monkeypatch: Any, patched: bool) -> None:
    """The first call of the guidance refreshes its own cache. The other calls of the step use their caches."""
    begins = flux.get_model_object("model_sampling").percent_to_sigma(0.15)
    pipeline = pack_module("toma_core.pipeline").Evaluation
    original = pipeline.cached
    found, late = list[tuple[int, str]](), list[tuple[int, str]]()

    def spy(self: Any, block: str, x: torch.Tensor, **named: Any) -> Any:
        block_cache = original(self, block, x, **named)
        how = "none" if block_cache is None else "reused" if hasattr(block_cache, "update") else "stored"
        found.append((self.step_plan.step, how))
        return block_cache

    def guidance(args: dict[str, Any]) -> torch.Tensor:
        if float(args["sigma"][0]) >= begins:
            return args["denoised"]
        options = args["model_options"]
        if patched:
            options = set_model_options_patch_replace(options.copy(), lambda a, _: a, "dit", "single_block", 1)
        start = len(found)
        noisy = args["input"] if patched else args["input"] * 0.9
        (other,) = comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], noisy, args["sigma"], options)
        late.extend(found[start:])
        return args["denoised"] + args["cond_denoised"] - other

    monkeypatch.setattr(pipeline, "cached", spy)
    model = attach(flux, full_step_interval=5, kv_cache=True).clone()
    model.set_model_sampler_post_cfg_function(guidance)
    models.sample(model, SIDE, SIDE, steps=8, last_step=5)
    first = late[0][0]
    assert 1 <= first < 3

    def of(step: int, within: list[tuple[int, str]]) -> set[str]:
        return {how for at, how in within if at == step}

    assert [of(step, late) for step in range(first, first + 2)] == [{"stored"}, {"reused"}]
    assert of(first, found) == {"stored", "reused"}
    assert of(first + 1, found) == {"reused"}
