"""Test the size of the KV cache that is predicted before a run: the run must hold as many bytes."""

from importlib import import_module
from typing import Any

import comfy.samplers
import torch
from comfy.sampler_helpers import convert_cond
from comfy.samplers import CFGGuider, ksampler
from comfy_extras.nodes_custom_sampler import Guider_DualCFG
from comfy_extras.nodes_perpneg import Guider_PerpNeg

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.kv_helpers import KEYS

evaluated = pack_module("nodes.adapters.evaluated")
SHAPE = (1, 16, HEIGHT, WIDTH)
SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2)


def guider_of(kind: Any, model: Any, *cfg: Any, prompts: tuple[str, ...] = ("positive", "negative")) -> Any:
    guider = kind(model)
    guider.conds = {name: convert_cond(models.conditioning(model, seed=seed)) for seed, name in enumerate(prompts)}
    if cfg:
        guider.set_cfg(*cfg)
    return guider


def parts(guider: Any, sampler: str = "euler", sigmas: tuple[float, ...] = SIGMAS) -> list[int]:
    return [len(each) for each in evaluated.evaluated_parts(guider, ksampler(sampler), SHAPE, sigmas)]


def test_comfyuis_guiders(flux: Any) -> None:
    for cfg, sampler, wanted in ((1.0, "euler", 1), (3.0, "euler", 2), (1.0, "euler_cfg_pp", 2)):
        guider = guider_of(CFGGuider, flux, cfg)
        assert parts(guider, sampler) == [wanted] * 5
        assert parts(guider, sampler, ()) == [wanted]
    perpendicular = guider_of(Guider_PerpNeg, flux, 3.0, 1.0, prompts=("positive", "negative", "empty_negative_prompt"))
    assert parts(perpendicular) == [3] * 5
    # The guidance scales decide which prompts the guider evaluates.
    for *dual, wanted in ((1.5, 2.0, False, 3), (1.5, 1.0, False, 2), (1.0, 1.0, False, 1), (1.0, 1.0, True, 3)):
        guider = guider_of(Guider_DualCFG, flux, *dual, prompts=("positive", "middle", "negative"))
        assert parts(guider) == [wanted] * 5


def test_guidance_of_video_and_audio(flux: Any) -> None:
    """With equal scales for video and audio, `LTXVDualCFGGuider` evaluates the same prompts as `CFGGuider`."""
    theirs = getattr(import_module("comfy_extras.nodes_lt"), "Guider_LTXAVDualCFG", None)

    class Own(CFGGuider):  # type: ignore[misc, valid-type]
        def set_cfg(self, video_cfg: float, audio_cfg: float) -> None:
            self.video_cfg, self.audio_cfg, self.cfg = video_cfg, audio_cfg, max(video_cfg, audio_cfg)

        def predict_noise(self, x: Any, timestep: Any, model_options: Any, seed: Any) -> Any:
            if self.video_cfg != self.audio_cfg:
                mixed = lambda args: args["uncond"] + self.video_cfg * args["cond_denoised"]  # noqa: E731
                options = {"sampler_cfg_function": mixed, "disable_cfg1_optimization": True}
                model_options = {**model_options, **options}
            return super().predict_noise(x, timestep, model_options, seed)

    for kind in (Own, *([theirs] if theirs else [])):
        for *cfg, wanted in ((1.0, 1.0, 1), (3.0, 3.0, 2), (1.0, 3.0, 2)):
            guider = guider_of(kind, flux, *cfg)
            guider._v_numel = 100  # set by the guider's `sample`
            before = dict(vars(guider))
            assert parts(guider) == [wanted] * 5
            assert vars(guider) == before


def test_a_guider_that_counts_is_not_changed_by_being_asked(flux: Any) -> None:
    """The guider counts its calls, evaluates a perturbed model at high noise, and draws random numbers."""

    class Counting(CFGGuider):  # type: ignore[misc]
        calls = 0

        def predict_noise(self, x: Any, timestep: Any, model_options: Any, seed: Any) -> Any:
            self.calls += 1
            self.log.append(float(timestep[0]))
            positive, negative = self.conds["positive"], self.conds["negative"]
            out = comfy.samplers.calc_cond_batch(self.inner_model, [positive, negative], x, timestep, model_options)
            if timestep[0] > 0.5:
                options = {"patches": {"attn1_patch": [print]}, **model_options["transformer_options"]}
                perturbed = {**model_options, "transformer_options": options}
                out += comfy.samplers.calc_cond_batch(self.inner_model, [positive], x, timestep, perturbed)
            return sum(out) + torch.randn(()) * self.inner_model.model_sampling.sigma_max

    guider = guider_of(Counting, flux)
    guider.log = []
    state = torch.get_rng_state()
    assert parts(guider) == [3, 3, 3, 2, 2]
    assert (guider.calls, guider.log) == (0, [])
    assert torch.equal(torch.get_rng_state(), state)


def test_of_other_guiders_all_conditions_count(flux: Any) -> None:
    class Raises(CFGGuider):  # type: ignore[misc]
        def predict_noise(self, *_: Any) -> Any:
            raise RuntimeError("of another pack")

    class RunsTheModel(CFGGuider):  # type: ignore[misc]
        def predict_noise(self, x: Any, timestep: Any, *_: Any) -> Any:
            return self.inner_model.apply_model(x, timestep)

    class Prepares(CFGGuider):  # type: ignore[misc]
        prepared = False

        def predict_noise(self, x: Any, *args: Any) -> Any:
            return super().predict_noise(x, *args) if self.prepared else x

        def inner_sample(self, *args: Any, **kwargs: Any) -> Any:
            self.prepared = True
            return super().inner_sample(*args, **kwargs)

    for kind in (Raises, RunsTheModel, Prepares):
        assert parts(guider_of(kind, flux)) == [2] * 5


def test_guidance_by_a_perturbed_model_counts_once_more(flux: Any) -> None:
    """Functions of guidance may hold state, so the size is predicted without calling these functions."""

    def perturbed(args: Any) -> Any:
        raise AssertionError
        return comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], {})

    guided = flux.clone()
    guided.set_model_sampler_post_cfg_function(perturbed)
    guided.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
    assert parts(guider_of(CFGGuider, guided, 3.0)) == [3] * 5


def turns(model: Any, entries: int, prompts: int) -> list[Any]:
    """Return a conditioning of `entries` entries, each active in its own part of the run. The entries use `prompts`
    different prompts in turn."""
    conds = list[Any]()
    for n in range(entries):
        times = {"start_percent": n / entries, "end_percent": (n + 1) / entries}
        conds += models.conditioning(model, seed=10 + n % prompts, **times)
    return conds


@loop("cfg", [1.0, 3.0])
@loop(("entries", "prompts", "more"), [(10, 2, 1.5), (4, 4, 1.0), (2, 2, 1.0)])
def test_prompts_that_take_turns(
    entries: int, prompts: int, more: float, cfg: float, flux: Any, stats_of: Any, requested: Any, monkeypatch: Any
) -> None:
    """Only caches of recently used prompts are held. Prompts of one call share a tensor, which is held as long as one
    of these prompts is recent. So a run may hold up to `more` times the memory that it requested."""
    merged, conds = balanced(flux), turns(flux, entries, prompts)
    models.sample(merged, HEIGHT, WIDTH, steps=20, cfg=cfg, positive=conds)
    stats, needed = stats_of(merged), requested[0]
    assert stats.merged_steps
    assert stats.cache_bytes / more <= needed <= 1.01 * stats.cache_bytes
    # If exactly the requested memory is free, a second run merges the same steps.
    monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: float(needed))
    models.sample(merged, HEIGHT, WIDTH, steps=20, cfg=cfg, positive=conds)
    assert (requested, stats_of(merged).merged_steps) == ([needed, needed], stats.merged_steps)


@loop("cfg", [1.0, 3.0])
@loop(
    "areas",
    [
        [(HEIGHT, WIDTH // 2, 0, 0), (HEIGHT, WIDTH // 2, 0, WIDTH // 2)],
        [("percentage", 0.5, 1.0, 0.0, 0.0), ("percentage", 0.5, 1.0, 0.5, 0.0)],
    ],
)
def test_areas_count_by_their_size(
    areas: Any, cfg: float, flux: Any, attach: Any, stats_of: Any, requested: list[int]
) -> None:
    merged, positive = attach(flux, **KEYS), models.conditioning(flux, seed=10)
    for n, area in enumerate(areas):
        positive += models.conditioning(flux, seed=11 + n, area=area)
    models.sample(merged, HEIGHT, WIDTH, steps=4, cfg=cfg, positive=positive)
    stats = stats_of(merged)
    assert stats.merged_steps
    assert stats.cache_bytes <= requested[0] <= 1.01 * stats.cache_bytes
