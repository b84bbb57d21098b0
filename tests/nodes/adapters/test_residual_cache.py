"""Test the residual cache on ComfyUI's blocks."""

from __future__ import annotations

from typing import Any

import comfy.samplers
import pytest
import torch
from comfy.model_patcher import set_model_options_patch_replace

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import Control, every_kind, prompts_of, split_calls

report_text = pack_module("nodes.adapters.report_text")

DELTA_WEIGHT = pack_module("toma_core.pipeline").DELTA_WEIGHT
SIDE = 24
REUSE = {"full_step_interval": 2}
# Batches of different sizes round differently. Sharp weights would amplify the difference for tokens with two nearly
# equal destinations, so use soft weights.
SMOOTH = {"selector": "grid", "sharpness": 20.0}
# Options that run the first step, or the first two steps, of a schedule of three steps. The last step, which is never
# merged, is not run.
FIRST = {1: {"steps": 3, "last_step": 1}, 2: {"steps": 3, "last_step": 2}}
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


@every_kind
@pytest.mark.compat
@loop("granularity", ["block", "stack"])
def test_a_full_step_is_that_of_the_model(
    model: Any, attach: Any, stats_of: Any, granularity: str, no_state_left: None
) -> None:
    """A full step equals a step of the model without ToMA, although hooks cache its residuals. The next step is
    merged."""
    patched = attach(model, **REUSE, granularity=granularity)
    assert torch.equal(models.sample(patched, SIDE, SIDE, **FIRST[1]), models.sample(model, SIDE, SIDE, **FIRST[1]))
    stats = stats_of(patched)
    assert (stats.merged_blocks, stats.merged_steps) == (set(), {})
    assert stats.selections > 0
    assert stats.cache_bytes > 0
    assert not torch.equal(*(models.sample(m, SIDE, SIDE, **FIRST[2]) for m in (model, patched)))
    assert stats_of(patched).merged_steps == {1: 0.5}
    assert stats_of(patched).merged_blocks == stats_of(patched).blocks != set()


def rows_of(plan: Any) -> torch.Tensor:
    """Return S (B, D, N) of a plan: S @ x are the destination tokens of x."""
    return torch.nn.functional.one_hot(plan.destinations, plan.tokens).float()


def reused(
    x: torch.Tensor, update: torch.Tensor, fresh: torch.Tensor, S: torch.Tensor, U: torch.Tensor
) -> torch.Tensor:
    """Compute x + a u + U t (f - a S u). u: `update`, the cached residual. f: `fresh`, the new residual of
    destinations. a: the projection coefficient of f on S u. t = 1 - (1 - DELTA_WEIGHT) a."""
    old = S @ update
    left = ((fresh * old).sum((1, 2), True) / (old * old).sum((1, 2), True)).clamp(0, 1)
    return x + left * update + U @ ((1 - (1 - DELTA_WEIGHT) * left) * (fresh - left * old))


def tokens_of(call: Any, name: str) -> torch.Tensor:
    return call.kwargs[name] if name in call.kwargs else call.args[0]


def test_unet_stack(unet: Any, attach: Any, record: Any, plan_calls: Any, dense: Any) -> None:
    """Two consecutive blocks have one joint residual."""
    first, last = unet.model.diffusion_model.middle_block[1].transformer_blocks
    starts, ends = record(first), record(last)
    models.sample(attach(unet, **REUSE), SIDE, SIDE, **FIRST[2])
    plan = plan_calls[starts[0].first_plan].plan
    S, U = rows_of(plan), dense(plan)[1]
    x, update = tokens_of(starts[1], "x"), ends[0].out - tokens_of(starts[0], "x")
    given = {name: starts[1].kwargs[name] for name in ("context", "transformer_options")}
    out = last(first(S @ x, **given), **given)
    torch.testing.assert_close(ends[1].out, reused(x, update, out - S @ x, S, U), **CLOSE)


@loop("references", [False, True])
@loop("kind", ["double", "single"])
def test_flux_blocks(
    flux: Any, attach: Any, record: Any, plan_calls: Any, dense: Any, kind: str, references: bool
) -> None:
    """Only image tokens have a cached residual. Text and references are outputs of the block."""
    name = "img" if kind == "double" else "x"
    block = getattr(flux.model.diffusion_model, f"{kind}_blocks")[0]
    calls = record(block)
    conds = prompts_of(flux, **({"reference_latents": [torch.randn(1, 16, 8, 8)]} if references else {}))
    models.sample(attach(flux, **REUSE, granularity="block"), SIDE, SIDE, **FIRST[2], **conds)
    full, merged = calls
    plan = plan_calls[full.first_plan].plan
    S, U = rows_of(plan), dense(plan)[1]
    text = merged.kwargs["transformer_options"]["img_slice"][0] if kind == "single" else 0
    image = slice(text, text + plan.tokens)

    def out_of(call: Any) -> torch.Tensor:
        return call.out[0] if kind == "double" else call.out

    x, update = tokens_of(merged, name), (out_of(full) - tokens_of(full, name))[:, image]
    kept = plan.destinations + (7 if kind == "double" else text)
    before = 7 if kind == "double" else text
    pe = merged.kwargs["pe"].expand(2, *merged.kwargs["pe"].shape[1:])
    rows = torch.stack([row[:, index] for row, index in zip(pe, kept, strict=True)])
    rows = torch.cat([pe[:, :, :before], rows, pe[:, :, before + plan.tokens :]], 2)
    reduced = torch.cat([x[:, :text], S @ x[:, image], x[:, image.stop :]], 1)
    given = {key: value for key, value in merged.kwargs.items() if key not in (name, "pe")}
    assert (x.shape[1] > image.stop) is references
    result = block(reduced.clone(), pe=rows, **given)
    out = (result[0] if kind == "double" else result)[:, text : text + plan.num_destinations]
    expected = reused(x[:, image], update, out - S @ x[:, image], S, U)
    torch.testing.assert_close(out_of(merged)[:, image], expected, **CLOSE)


@every_kind
@pytest.mark.compat
@loop("areas", [False, True])
def test_joined_and_split_calls_agree(model: Any, attach: Any, monkeypatch: Any, areas: bool) -> None:
    halves = [{"area": (SIDE, SIDE // 2, 0, left)} if areas else {} for left in (0, SIDE // 2)]
    positive = [models.conditioning(model, seed=seed, **half)[0] for seed, half in zip((1, 3), halves, strict=True)]
    patched = attach(model, **REUSE, **SMOOTH)
    joined = models.sample(patched, SIDE, SIDE, **FIRST[2], positive=positive)
    split_calls(monkeypatch, model)
    split = models.sample(patched, SIDE, SIDE, **FIRST[2], positive=positive)
    scale = joined.abs().max()
    torch.testing.assert_close(split / scale, joined / scale, rtol=1e-4, atol=1e-4)


def test_blocks_that_another_node_patches_are_full_at_full_steps(unet: Any, attach: Any) -> None:
    """Blocks that another node patches are merged with granularity "module", which has no residual cache."""
    watched = unet.clone()
    watched.set_model_attn1_output_patch(lambda n, extra_options: n)
    outs = [models.sample(m, SIDE, SIDE, **FIRST[1]) for m in (attach(watched, **REUSE), unet)]
    assert torch.equal(*outs)
    assert models.sample(attach(watched, **REUSE), SIDE, SIDE, steps=3).isfinite().all()


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


def test_a_patched_block_in_the_middle_of_a_stack_splits_its_residual(attach: Any, monkeypatch: Any) -> None:
    """Merged steps run certain chains of blocks. Full steps cache the residuals of exactly these chains."""
    cache = pack_module("toma_core.cache").Cache
    kept, found, put, read = set[str](), set[str](), cache.put, cache.read

    def putting(self: Any, keys: Any, *rest: Any) -> Any:
        kept.update(key[0] for key in keys)
        return put(self, keys, *rest)

    def reading(self: Any, keys: Any, *rest: Any) -> Any:
        cached = read(self, keys, *rest)
        found.update([] if cached is None else [keys[0][0]])
        return cached

    monkeypatch.setattr(cache, "put", putting)
    monkeypatch.setattr(cache, "read", reading)
    patched = models.unet(middle=4).clone()
    patched.set_model_attn1_replace(lambda q, k, v, options: q, "middle", 0, 1)
    models.sample(attach(patched, full_step_interval=3), 32, 32, steps=4)
    for names in (kept, found):
        assert {name for name in names if name.startswith("middle")} == {"middle.0.0", "middle.0.2-middle.0.3"}


def test_a_control_that_ends_takes_the_chains_it_split_with_it(flux: Any, attach: Any, stats_of: Any) -> None:
    """Two short chains of blocks become one long chain, which has no cached residual, so the step is full."""
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
def test_guidance_that_begins_late_is_full_once_and_cached_from_then_on(
    flux: Any, attach: Any, monkeypatch: Any, patched: bool
) -> None:
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
    model = attach(flux, full_step_interval=5).clone()
    model.set_model_sampler_post_cfg_function(guidance)
    models.sample(model, SIDE, SIDE, steps=8, last_step=5)
    first = late[0][0]
    assert 1 <= first < 3

    def of(step: int, within: list[tuple[int, str]]) -> set[str]:
        return {how for at, how in within if at == step}

    assert [of(step, late) for step in range(first, first + 2)] == [{"stored"}, {"reused"}]
    assert of(first, found) == {"stored", "reused"}
    assert of(first + 1, found) == {"reused"}
