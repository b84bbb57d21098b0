"""Test the size of the KV cache: the size that is predicted before a run equals the bytes that the run then holds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.kv_helpers import KEYS, preset

evaluated = pack_module("nodes.adapters.evaluated")
run = pack_module("nodes.adapters.patch_model")
SHAPE = (1, 16, HEIGHT, WIDTH)
SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2)


def conds_of(model: Any, *names: str) -> dict[str, Any]:
    from comfy.sampler_helpers import convert_cond

    return {name: convert_cond(models.conditioning(model, seed=seed)) for seed, name in enumerate(names)}


def parts(guider: Any, sampler: str = "euler", sigmas: tuple[float, ...] = SIGMAS) -> list[int]:
    from comfy.samplers import ksampler

    return [len(each) for each in evaluated.evaluated_parts(guider, ksampler(sampler), SHAPE, sigmas)]


def test_comfyuis_guider(flux: Any) -> None:
    from comfy.samplers import CFGGuider

    guider = CFGGuider(flux)
    guider.conds = conds_of(flux, "positive", "negative")
    for cfg, sampler, wanted in ((1.0, "euler", 1), (3.0, "euler", 2), (1.0, "euler_cfg_pp", 2)):
        guider.set_cfg(cfg)
        assert parts(guider, sampler) == [wanted] * 5
        assert parts(guider, sampler, ()) == [wanted]


@loop(
    ("cfg", "nested", "wanted"),
    [((1.5, 2.0), False, 3), ((1.5, 1.0), False, 2), ((1.0, 1.0), False, 1), ((1.0, 1.0), True, 3)],
)
def test_guidance_by_two_prompts(cfg: tuple[float, float], nested: bool, wanted: int, flux: Any) -> None:
    """The guidance scales of `DualCFGGuider` decide which prompts the guider evaluates."""
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    guider = Guider_DualCFG(flux)
    guider.conds = conds_of(flux, "positive", "middle", "negative")
    guider.set_cfg(*cfg, nested)
    assert parts(guider) == [wanted] * 5


def test_perpendicular_negative_guidance(flux: Any) -> None:
    from comfy_extras.nodes_perpneg import Guider_PerpNeg

    guider = Guider_PerpNeg(flux)
    guider.conds = conds_of(flux, "positive", "negative", "empty_negative_prompt")
    guider.set_cfg(3.0, 1.0)
    assert parts(guider) == [3] * 5


def test_guidance_of_video_and_audio(flux: Any) -> None:
    """Test a stand-in for `LTXVDualCFGGuider`, and this guider itself if ComfyUI has it. With equal scales for video
    and audio, it evaluates the same prompts as `CFGGuider`."""
    from comfy.samplers import CFGGuider

    theirs = getattr(import_module("comfy_extras.nodes_lt"), "Guider_LTXAVDualCFG", None)

    class Own(CFGGuider):  # type: ignore[misc, valid-type]
        def set_cfg(self, video_cfg: float, audio_cfg: float) -> None:
            self.video_cfg, self.audio_cfg, self.cfg = video_cfg, audio_cfg, max(video_cfg, audio_cfg)

        def predict_noise(self, x: Any, timestep: Any, model_options: Any = {}, seed: Any = None) -> Any:  # noqa: B006
            if self.video_cfg == self.audio_cfg:
                self.cfg = self.video_cfg
                return super().predict_noise(x, timestep, model_options, seed)
            model_options = {**model_options, "sampler_cfg_function": None, "disable_cfg1_optimization": True}
            model_options["sampler_cfg_function"] = lambda args: args["uncond"] + self.video_cfg * args["cond_denoised"]
            return super().predict_noise(x, timestep, model_options, seed)

    for kind in (Own, *([theirs] if theirs else [])):
        guider = kind(flux)
        guider._v_numel = 100  # set by the guider's `sample`
        guider.conds = conds_of(flux, "positive", "negative")
        for cfg, wanted in (((1.0, 1.0), 1), ((3.0, 3.0), 2), ((1.0, 3.0), 2)):
            guider.set_cfg(*cfg)
            before = dict(vars(guider))
            assert parts(guider) == [wanted] * 5
            assert vars(guider) == before


def test_a_guider_that_counts_is_not_changed_by_being_asked(flux: Any) -> None:
    """The guider counts its calls, evaluates a perturbed model at high noise, and draws random numbers."""
    import comfy.samplers

    class Counting(comfy.samplers.CFGGuider):  # type: ignore[misc]
        calls, seen = 0, [0.0]

        def predict_noise(self, x: Any, timestep: Any, model_options: Any = {}, seed: Any = None) -> Any:  # noqa: B006
            self.calls += 1
            self.log.append(float(timestep[0]))
            positive, negative = self.conds["positive"], self.conds["negative"]
            out = comfy.samplers.calc_cond_batch(self.inner_model, [positive, negative], x, timestep, model_options)
            if timestep[0] > 0.5:
                options = {"patches": {"attn1_patch": [noisy]}, **model_options["transformer_options"]}
                perturbed = {**model_options, "transformer_options": options}
                out += comfy.samplers.calc_cond_batch(self.inner_model, [positive], x, timestep, perturbed)
            return sum(out) + torch.randn(()) * self.inner_model.model_sampling.sigma_max

    def noisy(*args: Any) -> Any:
        return args

    guider = Counting(flux)
    guider.log, guider.conds = [], conds_of(flux, "positive", "negative")
    state = torch.get_rng_state()
    assert parts(guider) == [3, 3, 3, 2, 2]
    assert (guider.calls, guider.log) == (0, [])
    assert torch.equal(torch.get_rng_state(), state)


@loop("how", ["raises", "runs the model", "prepares"])
def test_of_other_guiders_all_conditions_count(how: str, flux: Any) -> None:
    from comfy.samplers import CFGGuider

    class Strange(CFGGuider):  # type: ignore[misc]
        def predict_noise(self, x: Any, timestep: Any, model_options: Any = {}, seed: Any = None) -> Any:  # noqa: B006
            if how == "runs the model":
                return self.inner_model.apply_model(x, timestep)
            raise RuntimeError("of another pack")

    class Prepared(CFGGuider):  # type: ignore[misc]
        prepared = False

        def predict_noise(self, x: Any, timestep: Any, model_options: Any = {}, seed: Any = None) -> Any:  # noqa: B006
            return super().predict_noise(x, timestep, model_options, seed) if self.prepared else x

        def inner_sample(self, *args: Any, **kwargs: Any) -> Any:
            self.prepared = True
            return super().inner_sample(*args, **kwargs)

    guider = (Prepared if how == "prepares" else Strange)(flux)
    guider.conds = conds_of(flux, "positive", "negative")
    assert parts(guider) == [2] * 5


def test_guidance_by_a_perturbed_model_counts_once_more(flux: Any) -> None:
    """The size is predicted without a call of the guidance's functions, which may hold state."""
    import comfy.samplers

    def perturbed(args: Any) -> Any:
        raise AssertionError
        return comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], {})

    guided = flux.clone()
    guided.set_model_sampler_post_cfg_function(perturbed)
    guided.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
    guider = comfy.samplers.CFGGuider(guided)
    guider.conds = conds_of(flux, "positive", "negative")
    guider.set_cfg(3.0)
    assert parts(guider) == [3] * 5


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes that runs request from ComfyUI."""
    reserve, found = pack_module("nodes.adapters.kv_memory").reserved, list[int]()
    monkeypatch.setattr(run, "reserved", lambda model, more: found.append(more) or reserve(model, more))
    return found


def turns(model: Any, entries: int, prompts: int = 2) -> list[Any]:
    """Return conditioning with `entries` entries, which have `prompts` prompts in turn. Each entry is active in its own
    part of the run."""
    conds = []
    for n in range(entries):
        ((tensor, options),) = models.conditioning(model, seed=10 + n % prompts)
        conds.append([tensor, {**options, "start_percent": n / entries, "end_percent": (n + 1) / entries}])
    return conds


@loop("cfg", [1.0, 3.0])
@loop(("entries", "prompts"), [(10, 2), (4, 4), (2, 2)])
def test_prompts_that_take_turns(
    entries: int, prompts: int, cfg: float, model_of: Any, stats_of: Any, asked: list[int]
) -> None:
    """Only the caches of recently used prompts are held."""
    model = model_of("flux")
    merged = run.apply_toma(model, preset("balanced"))
    models.sample(merged, HEIGHT, WIDTH, steps=20, cfg=cfg, positive=turns(model, entries, prompts))
    stats = stats_of(merged)
    assert stats.merged_steps
    assert stats.cache_bytes <= asked[0] <= 1.01 * stats.cache_bytes


def in_areas(model: Any, *areas: Any) -> list[Any]:
    conds = models.conditioning(model, seed=10)
    for n, area in enumerate(areas):
        ((tensor, options),) = models.conditioning(model, seed=11 + n)
        conds.append([tensor, {**options, "area": area}])
    return conds


@loop("cfg", [1.0, 3.0])
@loop(
    "areas",
    [
        [(HEIGHT, WIDTH // 2, 0, 0), (HEIGHT, WIDTH // 2, 0, WIDTH // 2)],
        [("percentage", 0.5, 1.0, 0.0, 0.0), ("percentage", 0.5, 1.0, 0.5, 0.0)],
    ],
)
def test_areas_count_by_their_size(
    areas: Any, cfg: float, model_of: Any, attach: Any, stats_of: Any, asked: list[int]
) -> None:
    model = model_of("flux")
    merged = attach(model, **KEYS)
    models.sample(merged, HEIGHT, WIDTH, steps=4, cfg=cfg, positive=in_areas(model, *areas))
    stats = stats_of(merged)
    assert stats.merged_steps
    assert stats.cache_bytes <= asked[0] <= 1.01 * stats.cache_bytes


def test_prompts_that_take_turns_fit_where_two_prompts_fit(
    model_of: Any, stats_of: Any, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exactly the memory that a first run requested, a second run merges as many steps as the first."""
    memory, model = pack_module("nodes.adapters.kv_memory"), model_of("flux")
    merged, conds = run.apply_toma(model, preset("balanced")), turns(model, 10)
    models.sample(merged, HEIGHT, WIDTH, steps=20, positive=conds)
    steps, needed = len(stats_of(merged).merged_steps), asked[0]
    monkeypatch.setattr(memory, "memory_left", lambda *_: float(needed))
    models.sample(merged, HEIGHT, WIDTH, steps=20, positive=conds)
    assert (asked, len(stats_of(merged).merged_steps)) == ([needed, needed], steps)
