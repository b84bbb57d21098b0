"""Runs that are no plain sequence of steps, on a trained model where the error matters.

Samplers of other packs evaluate other sizes in between, change prompts at every step, tell the model another noise
level than they are at, repeat steps and skip them. The error of a merged run stays within twice that of the plain
sequence, and what no cache serves is full and counted so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scripts.comfy_pack import pack_module
from tests.loop import loop

STEPS = 8
SIZE = 32  # pixels: 16 x 16 tokens


@pytest.fixture(scope="module")
def few(pack: Any) -> Any:
    from demo.sampling import load

    return load("few")


@pytest.fixture(scope="module")
def merged(few: Any) -> Any:
    toma = pack_module("toma_core").Settings("balanced", {"min_tokens": 4, "ratio": 0.5})
    return pack_module("nodes.adapters.patch_model").apply_toma(few, toma)


def prompt(seed: int, **options: Any) -> list[Any]:
    from demo.conditioning import conditioning
    from demo.scenes import scene_from_seed

    (tokens, extra), *_ = conditioning([scene_from_seed(seed)], float(STEPS))
    return [[tokens.clone(), {**extra, "pooled_output": extra["pooled_output"].clone(), **options}]]


@torch.no_grad()
def drawn(model: Any, function: Callable[..., Tensor] | None = None, positive: Any = None, **options: Any) -> Tensor:
    """A latent of a small picture. function: a sampler of k-diffusion's kind; Euler if none."""
    import comfy.sample
    from comfy.samplers import KSAMPLER, calculate_sigmas, ksampler

    from demo.conditioning import empty_latent, seeded_noise

    sampler = ksampler("euler") if function is None else KSAMPLER(function, options)
    sigmas = calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
    positive, latent = prompt(3) if positive is None else positive, empty_latent(SIZE, SIZE)
    noise = seeded_noise([1], SIZE, SIZE)
    return comfy.sample.sample_custom(
        model, noise, 1.0, sampler, sigmas, positive, prompt(4), latent, seed=1, disable_pbar=True
    )


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def plain(few: Any, merged: Any) -> float:
    """The error of the plain sequence."""
    found = error(drawn(merged), drawn(few))
    assert 1e-4 < found < 0.2
    return found


def euler(between: Callable[..., None] = lambda *_: None) -> Callable[..., Tensor]:
    """Euler's method, which calls `between(model, x, level, step)` after each evaluation and reports its steps."""

    def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        for step in range(len(sigmas) - 1):
            level = sigmas[step].expand(len(x))
            denoised = model(x, level, **extra_args)
            if callback is not None:
                callback({"i": step, "x": x, "denoised": denoised})
            between(lambda y, s, model=model: model(y, s, **extra_args), x, level, step)
            x = denoised + (x - denoised) * sigmas[step + 1] / sigmas[step]
        return x

    return function


@loop("shape", ["half", "wide", "always"])
def test_another_size_in_the_same_run(few: Any, merged: Any, plain: float, stats_of: Any, shape: str) -> None:
    """As Dy and SMEA samplers have it; what it shows changes nothing in the picture."""

    def between(model: Any, x: Tensor, level: Tensor, step: int) -> None:
        if shape == "always" or step % 2:
            model(x[..., ::2, :] if shape == "wide" else x[..., ::2, ::2], level)

    outs = [drawn(model, euler(between)) for model in (merged, few)]
    assert error(*outs) < 2 * plain
    stats = stats_of(merged)
    assert stats.merged_evaluations > STEPS // 2, "both sizes are merged where both have caches"
    assert bool(stats.full_reasons) is (shape != "always"), "what begins between two full steps is full once"


@loop("equal", [True, False])
def test_a_prompt_for_every_step(few: Any, merged: Any, plain: float, stats_of: Any, equal: bool) -> None:
    """Prompts of one text share a cache, in whatever objects it comes; of others every step is full."""
    times = [(n / STEPS, (n + 1) / STEPS) for n in range(STEPS)]
    positive = [
        c for n, (a, b) in enumerate(times) for c in prompt(3 + (not equal) * n, start_percent=a, end_percent=b)
    ]
    positive[0][1].pop("start_percent")
    outs = [drawn(model, positive=positive) for model in (merged, few)]
    assert error(*outs) < 2 * plain
    stats = stats_of(merged)
    if equal:
        assert not stats.full_reasons
        drawn(merged)
        assert stats.merged_steps == stats_of(merged).merged_steps
    else:
        assert len(stats.merged_steps) <= 2
        assert "nothing cached yet for a prompt" in stats.text()


@loop("factor", [0.9, 0.6, 1.1])
@loop("wraps", [True, False])
def test_a_noise_level_that_is_changed_on_purpose(
    few: Any, merged: Any, plain: float, stats_of: Any, factor: float, wraps: bool
) -> None:
    """Detail Daemon and Lying Sigma wrap a sampler, and give the model other levels than those it is at."""
    from comfy.samplers import ksampler

    def function(model: Any, x: Any, sigmas: Any, inner: Any = None, **rest: Any) -> Any:
        class Told:
            inner_model = model.inner_model

            def __call__(self, x: Any, sigma: Any, **extra: Any) -> Any:
                step = int((sigmas - sigma[0]).abs().argmin())
                return model(x, sigma * (factor if 0 < step < STEPS - 1 else 1.0), **extra)

        used = inner.sampler_function if inner is not None else ksampler("euler").sampler_function
        return used(Told(), x, sigmas, **rest)

    options = {"inner": ksampler("euler")} if wraps else {}
    outs = [drawn(model, function, **options) for model in (merged, few)]
    told = set(stats_of(merged).merged_steps)
    drawn(merged)
    usual = set(stats_of(merged).merged_steps)
    assert usual - told <= ({1} if not wraps and factor > 1 else set())
    assert error(*outs) < 2 * plain


ACTIONS = st.lists(st.sampled_from(["small", "wide", "repeat", "other", "back", "told", "skip"]), max_size=3)


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    """A prompt that another one follows."""
    return [*prompt(3, end_percent=0.55), *prompt(5, start_percent=0.55)]


@pytest.fixture(scope="module")
def plain_of_two(few: Any, merged: Any, prompts: list[Any]) -> float:
    """The error of the plain sequence with these prompts."""
    return error(*(drawn(model, positive=prompts) for model in (merged, few)))


@settings(max_examples=8)
@given(actions=st.lists(ACTIONS, min_size=STEPS, max_size=STEPS), reports=st.booleans())
def test_any_sequence_of_evaluations(
    few: Any, merged: Any, prompts: list[Any], plain_of_two: float, actions: list[list[str]], reports: bool
) -> None:
    """The error is at most twice that of the plain sequence, and each evaluation is counted as it was made."""

    def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        def at(y: Tensor, level: Tensor) -> Tensor:
            return model(y, level.expand(len(y)), **extra_args)

        denoised = x
        for step, wanted in enumerate(actions):
            level = sigmas[step] * (0.8 if "told" in wanted and step else 1.0)
            if "skip" not in wanted or not step:
                denoised = at(x, level)
            if callback is not None and reports:
                callback({"i": step, "x": x, "denoised": denoised})
            for action in wanted:
                if action == "small":
                    at(x[..., ::2, ::2], level)
                elif action == "wide":
                    at(x[..., ::2, :], level)
                elif action == "repeat":
                    denoised = (denoised + at(x, level)) / 2
                elif action == "back":
                    at(x, sigmas[0])
                elif action == "other":
                    at(x + 0.1, sigmas[step + 1] if step + 1 < STEPS else level)
            x = denoised + (x - denoised) * sigmas[step + 1] / sigmas[step]
        return x

    outs = [drawn(model, function, positive=prompts) for model in (merged, few)]
    assert error(*outs) < 2 * plain_of_two
