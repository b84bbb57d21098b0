"""Test unusual sequences of evaluations on trained models, compared with Euler's method.

Samplers of other packs evaluate latents of a second size, change prompts at every step, repeat and skip steps, and use
sigmas that are not in the schedule. The error of merging must be at most twice the error with Euler's method.
"""

import os
from collections.abc import Callable
from typing import Any

import comfy.sample
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy.samplers import KSAMPLER, calculate_sigmas, ksampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from demo.conditioning import conditioning, empty_latent, seeded_noise
from demo.sampling import load
from demo.scenes import scene_from_seed
from scripts.comfy_pack import pack_module
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced

report_text = pack_module("nodes.adapters.report_text")

# By model: number of steps, side in pixels, guidance scale, and the guidance of a FluxGuidance node.
KINDS: dict[str, tuple[int, int, float, float | None]] = {"few": (8, 32, 1.0, 8.0), "dit": (12, 64, 2.0, None)}
EXAMPLES = int(os.environ.get("TOMA_SEQUENCES", "3"))  # random sequences of evaluations for each model


class Trained:
    """A trained model with and without ToMA, and its sampling settings."""

    def __init__(self, kind: str) -> None:
        self.steps, self.size, self.cfg, self.guidance = KINDS[kind]
        self.model = load(kind)
        self.merged = balanced(self.model, ratio=0.5)

    def prompt(self, seed: int, **options: Any) -> list[Any]:
        (tokens, extra), *_ = conditioning([scene_from_seed(seed)], self.guidance)
        return [[tokens.clone(), {**extra, "pooled_output": extra["pooled_output"].clone(), **options}]]

    @torch.no_grad()
    def drawn(
        self, model: Any, function: Callable[..., Tensor] | None = None, positive: Any = None, **options: Any
    ) -> Tensor:
        """Sample a latent of a small picture. function: a sampler with k-diffusion's interface, by default Euler."""
        sampler = ksampler("euler") if function is None else KSAMPLER(function, options)
        sigmas = calculate_sigmas(model.get_model_object("model_sampling"), "simple", self.steps)
        positive, latent = positive or self.prompt(3), empty_latent(self.size, self.size)
        noise = seeded_noise([1], self.size, self.size)
        return comfy.sample.sample_custom(
            model, noise, self.cfg, sampler, sigmas, positive, self.prompt(4), latent, seed=1, disable_pbar=True
        )

    def error(self, *args: Any, **options: Any) -> float:
        """Return the error of merging, see `drawn`. The merged run comes last, so that its stats can be read."""
        plain, merged = (self.drawn(model, *args, **options) for model in (self.model, self.merged))
        return float((merged - plain).norm() / plain.norm())


@pytest.fixture(scope="module", params=list(KINDS))
def trained(request: pytest.FixtureRequest, pack: Any) -> Trained:
    return Trained(request.param)


@pytest.fixture(scope="module")
def plain_run(trained: Trained, stats_of: Any) -> tuple[float, dict[int, float]]:
    """Return the error of merging with Euler's method, and the ratio of each merged step."""
    found = trained.error()
    assert 1e-4 < found < 0.2
    return found, dict(stats_of(trained.merged).merged_steps)


@pytest.fixture(scope="module")
def plain(plain_run: tuple[float, dict[int, float]]) -> float:
    return plain_run[0]


@pytest.fixture(scope="module")
def usual(plain_run: tuple[float, dict[int, float]]) -> dict[int, float]:
    return plain_run[1]


def step_euler(x: Tensor, denoised: Tensor, sigmas: Tensor, step: int) -> Tensor:
    return denoised + (x - denoised) * sigmas[step + 1] / sigmas[step]


def stepping(evaluate: Callable[..., Tensor], reports: bool = True) -> Callable[..., Tensor]:
    """Return Euler's method as a sampler with k-diffusion's interface. evaluate(call, x, sigmas, step): returns the
    prediction of a step; call(x, sigma) calls the model. reports: whether the sampler calls its callback."""

    def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        call = lambda latent, sigma: model(latent, sigma.expand(len(latent)), **extra_args)  # noqa: E731
        for step in range(len(sigmas) - 1):
            denoised = evaluate(call, x, sigmas, step)
            if reports:
                callback({"i": step, "x": x, "denoised": denoised})
            x = step_euler(x, denoised, sigmas, step)
        return x

    return function


@loop("shape", ["half", "always"])
def test_another_size_in_the_same_run(trained: Trained, plain: float, stats_of: Any, shape: str) -> None:
    """Between steps, Dy and SMEA samplers evaluate a latent of a second size. This test ignores the result of such an
    evaluation."""

    def evaluate(call: Any, x: Tensor, sigmas: Tensor, step: int) -> Any:
        if step and (shape == "always" or step % 2 == 0):
            call(x[..., ::2, ::2], sigmas[step - 1])
        return call(x, sigmas[step])

    assert trained.error(stepping(evaluate)) < 1.25 * plain
    stats = stats_of(trained.merged)
    assert stats.merged_in.total() > trained.steps // 2, "both sizes are merged where both have caches"
    assert bool(stats.full_reasons) is (shape != "always"), "what begins between two full steps is full once"


def test_latents_by_turns(trained: Trained, plain: float, usual: dict[int, float], stats_of: Any) -> None:
    """The sampler evaluates two latents in each step, as for two tiles. Only the first latent uses the caches."""
    others = list[Tensor]()

    def evaluate(call: Any, x: Tensor, sigmas: Tensor, step: int) -> Any:
        if not step:
            others[:] = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)) * sigmas[0]]
        denoised = call(x, sigmas[step])
        others.append(step_euler(others[-1], call(others[-1], sigmas[step]), sigmas, step))
        return denoised

    assert trained.error(stepping(evaluate)) < 1.1 * plain
    stats = stats_of(trained.merged)
    assert (stats.evaluations, stats.merged_in.total()) == (2 * trained.steps, len(usual))


def test_a_call_that_another_node_adds_to_an_evaluation(trained: Trained) -> None:
    """A wrapper evaluates a second prompt in each step, before or after the first prompt. Each prompt has its own
    caches."""
    other, outs = trained.prompt(9)[0][0], []
    for added_first in (False, True):

        def twice(executor: Any, x: Tensor, timestep: Tensor, context: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            contexts = [context, other.to(context).expand_as(context)]
            order = contexts[::-1] if added_first else contexts  # noqa: B023
            found = {id(each): executor(x, timestep, each, *args, **kwargs) for each in order}
            own, added = (found[id(each)] for each in contexts)
            return own + 0.5 * (own - added)

        model = trained.merged.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "twice", twice)
        outs.append(trained.drawn(model))
    assert torch.equal(*outs)


@loop("equal", [True, False])
def test_a_prompt_for_every_step(trained: Trained, plain: float, usual: Any, stats_of: Any, equal: bool) -> None:
    """Equal prompts share a cache even if they are different objects. With different texts, most steps are full."""
    steps = trained.steps
    positive = trained.prompt(3, end_percent=1 / steps)
    for n in range(1, steps):
        positive += trained.prompt(3 if equal else 3 + n, start_percent=n / steps, end_percent=(n + 1) / steps)
    error, stats = trained.error(positive=positive), stats_of(trained.merged)
    if equal:
        assert error < 1.25 * plain
        assert (stats.full_reasons, stats.merged_steps) == ({}, usual)
    else:
        assert error < plain
        assert len(stats.merged_steps) <= steps // 3
        assert "nothing cached yet for a prompt" in report_text.summary(stats)


def test_an_area_with_too_few_tokens(trained: Trained, plain: float, usual: dict[int, float], stats_of: Any) -> None:
    """The area is never merged or cached. The conditions without an area are merged in the usual steps."""
    assert trained.error(positive=[*trained.prompt(3), *trained.prompt(5, area=(2, 2, 4, 4))]) < 2 * plain
    stats = stats_of(trained.merged)
    assert (stats.full_reasons, stats.merged_steps) == ({}, usual)


def test_a_condition_that_begins_exactly_at_a_step(trained: Trained) -> None:
    """As in ComfyUI, the sigmas at which a condition begins and ends are rounded to fp32."""
    is_active = pack_module("nodes.adapters.conditions").is_active
    sampling = trained.model.get_model_object("model_sampling")
    for n in range(1, trained.steps):
        begin = sampling.percent_to_sigma(n / trained.steps)
        assert is_active({"timestep_start": begin, "timestep_end": begin}, float(torch.tensor(begin)))


CHANGED = [(0.9, True), (0.6, False), (1.1, True)]


@loop(("factor", "wraps"), CHANGED)
def test_a_sigma_that_is_changed_on_purpose(
    trained: Trained, plain: float, usual: dict[int, float], stats_of: Any, factor: float, wraps: bool
) -> None:
    """Detail Daemon and Lying Sigma wrap a sampler and pass the model sigmas that are not in the schedule."""

    def function(model: Any, x: Any, sigmas: Any, inner: Any = None, **rest: Any) -> Any:
        class Told:
            inner_model = model.inner_model

            def __call__(self, x: Any, sigma: Any, **extra: Any) -> Any:
                step = int((sigmas - sigma[0]).abs().argmin())
                return model(x, sigma * (factor if 0 < step < trained.steps - 1 else 1.0), **extra)

        used = inner.sampler_function if inner is not None else ksampler("euler").sampler_function
        return used(Told(), x, sigmas, **rest)

    assert trained.error(function, **({"inner": ksampler("euler")} if wraps else {})) < 2 * plain
    fewer = usual.keys() - stats_of(trained.merged).merged_steps.keys()
    assert len(fewer) <= 2, "more full steps where a refresh was at a distant noise level"


def test_the_last_step_is_full_after_a_skipped_step(trained: Trained, plain: float, stats_of: Any) -> None:
    """If a sampler reports no steps and changes sigmas, ToMA counts the steps itself, and misses a skipped step."""
    predictions = list[Tensor]()

    def evaluate(call: Any, x: Tensor, sigmas: Tensor, step: int) -> Tensor:
        if step != trained.steps - 2:
            predictions.append(call(x, sigmas[step] * (0.8 if step == trained.steps - 3 else 1.0)))
        return predictions[-1]

    assert trained.error(stepping(evaluate, reports=False)) < 1.6 * plain
    assert stats_of(trained.merged).merged_in.total() > trained.steps // 3


def test_refreshes_at_a_distant_noise_level_do_not_serve(trained: Trained, plain: float) -> None:
    """A cache is not used if the noise level has changed much since its refresh, whatever the step index."""

    def evaluate(call: Any, x: Tensor, sigmas: Tensor, step: int) -> Any:
        return call(x, sigmas[max(0, step - 4) if step % 4 == 0 else step])

    assert trained.error(stepping(evaluate)) < 1.6 * plain


class Watched:
    """Counts evaluations. An evaluation is merged if the last block gets fewer tokens than text and image have."""

    def __init__(self, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evaluations = self.merged = self.lacking = self.text = 0
        network = trained.model.model.diffusion_model
        block, self.patch = network.single_blocks[-1], network.patch_size
        original, self.tokens = type(block).__call__, list[int]()
        cache = pack_module("toma_core.cache").Cache
        read = cache.read

        def called(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if module is block:
                self.tokens.append(x.shape[1])
            return original(module, x, *args, **kwargs)

        def reading(*args: Any) -> Any:
            found = read(*args)
            self.lacking += found is None
            return found

        monkeypatch.setattr(type(block), "__call__", called)
        monkeypatch.setattr(cache, "read", reading)

    def call(self, model: Any, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.tokens.clear()
        out = model(y, *args, **kwargs)
        self.evaluations += 1
        image = -(-y.shape[-2] // self.patch) * -(-y.shape[-1] // self.patch)
        self.text = self.text or self.tokens[0] - image
        assert len(set(self.tokens)) == 1, "all conditions alike"
        self.merged += self.tokens[0] < self.text + image
        return out


@pytest.fixture
def watched(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(trained, monkeypatch)


ACTIONS = ("small", "wide", "odd", "repeat", "other", "back", "sigma", "skip", "noise", "prompt", "positions")


@pytest.fixture(scope="module")
def two_prompts(trained: Trained) -> tuple[list[Any], float]:
    """Return prompts for the first and the second half of a run, and the error of merging with these prompts."""
    positive = [*trained.prompt(3, end_percent=0.55), *trained.prompt(5, start_percent=0.55)]
    return positive, trained.error(positive=positive)


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    actions=st.lists(st.lists(st.sampled_from(ACTIONS), max_size=3), min_size=12, max_size=12),
    reports=st.booleans(),
)
def test_any_sequence_of_evaluations(
    trained: Trained, two_prompts: Any, stats_of: Any, watched: Watched, actions: list[list[str]], reports: bool
) -> None:
    """Each step has up to three random actions. No block of a merged evaluation lacks its cache."""
    positive, usual_error = two_prompts

    def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        guider = model.inner_model
        prompts = guider.conds["positive"]
        another = [{name: value for name, value in prompts[-1].items() if not name.startswith("timestep")}]

        def at(y: Tensor, level: Tensor, changed: tuple[str, ...] = ()) -> Tensor:
            given = extra_args
            if "positions" in changed:
                options = given["model_options"]
                scaled = {"scale_x": 1.4, "scale_y": 1.0}
                own = {**options["transformer_options"], "rope_options": scaled}
                given = {**given, "model_options": {**options, "transformer_options": own}}
            guider.conds["positive"] = another if "prompt" in changed else prompts
            try:
                return watched.call(model, y, level.expand(len(y)), **given)
            finally:
                guider.conds["positive"] = prompts

        denoised, generator = x, torch.Generator().manual_seed(5)
        for step in range(trained.steps):
            wanted = actions[step]
            level = sigmas[step] * (0.8 if "sigma" in wanted and step else 1.0)
            # Never skip the first step, which has no earlier prediction, or the last, whose error no later step
            # corrects.
            if "skip" not in wanted or not 0 < step < trained.steps - 1:
                denoised = at(x, level, tuple(wanted))
            if callback is not None and reports:
                callback({"i": step, "x": x, "denoised": denoised})
            parts = {"small": x[..., ::2, ::2], "wide": x[..., ::2, :], "odd": x[..., 1:, 3:]}
            for action in wanted:
                if action in parts:
                    at(parts[action], level)
                elif action == "repeat":
                    denoised = (denoised + at(x, level)) / 2
                elif action == "back":
                    at(x, sigmas[0])
                elif action == "other":
                    at(x + 0.1, sigmas[step + 1] if step + 1 < trained.steps else level)
            x = step_euler(x, denoised, sigmas, step)
            if "noise" in wanted:
                x = x + sigmas[step + 1] * torch.randn(x.shape, generator=generator)
        return x

    plain = trained.drawn(trained.model, function, positive)
    watched.evaluations = watched.merged = watched.lacking = 0
    found = trained.drawn(trained.merged, function, positive)
    stats = stats_of(trained.merged)
    assert (stats.evaluations, stats.merged_in.total()) == (watched.evaluations, watched.merged)
    assert watched.lacking == 0
    assert bool(stats.merged_steps) is bool(watched.merged)
    assert float((found - plain).norm() / plain.norm()) < 2 * usual_error
