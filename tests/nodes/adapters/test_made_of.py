"""A cache is used only for the inputs that it was made from. The tests change noise, prompts, pictures, positions and
weights, on trained models.

The error of merging is at most twice the error in a run without these changes. Steps without a valid cache are full.
"""

from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from comfy.samplers import calculate_sigmas, sampler_object
from torch import Tensor

from tests.loop import loop
from tests.nodes.adapters import test_evaluations as quick
from tests.nodes.adapters.test_evaluations import Trained, step_euler

trained, plain_run, plain, usual = quick.trained, quick.plain_run, quick.plain, quick.usual


def error_of(trained: Trained, change: Callable[[Any], None]) -> float:
    """Return the error of merging for models that `change` has changed."""
    own, merged = trained.model.clone(), trained.merged.clone()
    change(own)
    change(merged)
    plain = trained.drawn(own)
    return float((trained.drawn(merged) - plain).norm() / plain.norm())


def why_full(stats: Any) -> set[str]:
    return {reason.id.value for reason in stats.full_reasons}


@loop("name", ["heun", "res_multistep", "dpmpp_2m", "deis", "uni_pc", "ipndm"])
def test_samplers_without_new_noise_lose_no_merged_step(trained: Trained, usual: Any, stats_of: Any, name: str) -> None:
    trained.drawn(trained.merged, sampler_object(name).sampler_function)
    assert stats_of(trained.merged).merged_steps == usual


def by_turns(trained: Trained) -> list[Any]:
    """Return two prompts that alternate from step to step, as in the prompt syntax `[a|b]`."""
    found, steps = [], trained.steps
    for step in range(steps):
        times = {"start_percent": max(0.0, (step - 0.5) / steps), "end_percent": (step + 0.5) / steps}
        found += trained.prompt(5 if step % 2 else 3, **times)
    return found


def test_prompts_that_take_turns(trained: Trained, plain: float) -> None:
    assert trained.error(positive=by_turns(trained)) < 2 * plain


def test_two_pictures_of_one_size_that_take_turns(trained: Trained, plain: float, stats_of: Any) -> None:
    """In each step, FlowEdit evaluates the original picture and the edited picture, with the same new noise and
    different prompts. Neither picture can use the other picture's cache, so steps are full."""
    picture = trained.drawn(trained.model, positive=trained.prompt(4))

    def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        guider, generator = model.inner_model, torch.Generator().manual_seed(3)
        own = guider.conds["positive"]
        other = [{**cond} for cond in guider.conds.get("negative", own)]
        edited = picture.clone()
        for step in range(len(sigmas) - 1):
            level = sigmas[step].expand(len(x))
            noise = torch.randn(x.shape, generator=generator)
            noisy = (1 - sigmas[step]) * picture + sigmas[step] * noise
            guider.conds["positive"] = other
            before = model(noisy, level, **extra_args)
            guider.conds["positive"] = own
            y = edited + noisy - picture
            after = model(y, level, **extra_args)
            callback({"i": step, "x": y, "denoised": after})
            change = ((y - after) - (noisy - before)) / sigmas[step]
            edited = edited + (sigmas[step + 1] - sigmas[step]) * change
        return edited

    assert trained.error(function, trained.prompt(5)) < 0.5 * plain
    assert stats_of(trained.merged).evaluations == 2 * trained.steps


class Embedder(torch.nn.Module):
    """Positions that change from step to step, as in DyPE, a node for larger pictures."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self.own, self.scale = own, 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return self.own(ids * self.scale)  # type: ignore[no-any-return]


def test_positions_of_another_node(trained: Trained, plain: float, stats_of: Any) -> None:
    embedder = Embedder(trained.model.get_model_object("diffusion_model").pe_embedder)

    def scaled(apply: Any, args: dict[str, Any]) -> Tensor:
        embedder.scale = 1.0 - 0.4 * float(args["timestep"].flatten()[0])
        found: Tensor = apply(args["input"], args["timestep"], **args["c"])
        return found

    def change(model: Any) -> None:
        model.add_object_patch("diffusion_model.pe_embedder", embedder)
        model.set_model_unet_function_wrapper(scaled)

    assert error_of(trained, change) < 2 * plain
    assert "foreign_positions" in why_full(stats_of(trained.merged))


def test_positions_that_a_node_scales_in_its_options(trained: Trained, plain: float, stats_of: Any) -> None:

    def scaled(executor: Any, *args: Any, **kwargs: Any) -> Any:
        options = args[4]["transformer_options"]
        options["rope_options"] = {"scale_x": 1.0 + 0.4 * float(args[3].flatten()[0]), "scale_y": 1.0}
        return executor(*args, **kwargs)

    def change(model: Any) -> None:
        wrappers = model.model_options["transformer_options"].setdefault("wrappers", {})
        wrappers[WrappersMP.CALC_COND_BATCH] = {"test": [scaled], **wrappers.get(WrappersMP.CALC_COND_BATCH, {})}

    assert error_of(trained, change) < 2 * plain
    assert stats_of(trained.merged).merged_in.total() == 0


def lora(model: Any) -> dict[str, Tensor]:
    """Return a LoRA for the output of every single block, strong enough to change the picture."""
    found, generator = {}, torch.Generator().manual_seed(5)
    for name, weight in model.model.state_dict().items():
        if "single_blocks" in name and name.endswith("linear2.weight"):
            rows, columns = weight.shape
            size = float(weight.float().std()) * 0.7
            found[name.replace(".weight", ".lora_up.weight")] = torch.randn(rows, 2, generator=generator) * size
            found[name.replace(".weight", ".lora_down.weight")] = torch.randn(2, columns, generator=generator)
    assert found
    return found


def hooked(trained: Trained, frames: dict[float, float]) -> list[Any]:
    """Return a prompt with a hook LoRA. frames: start percent -> strength of the LoRA from there on."""
    import comfy.hooks

    group, keyframes = comfy.hooks.create_hook_lora(lora(trained.model), 1.0, 0.0), comfy.hooks.HookKeyframeGroup()
    for start, strength in frames.items():
        keyframes.add(comfy.hooks.HookKeyframe(strength, start_percent=start))
    group.set_keyframes_on_hooks(keyframes)
    conditioned: list[Any] = comfy.hooks.set_hooks_for_conditioning(trained.prompt(3), group)
    return conditioned


@loop("strengths", [(1.0, 0.0), (0.0, 1.0, 0.0)])
def test_weights_that_change(trained: Trained, plain: float, stats_of: Any, strengths: tuple[float, ...]) -> None:
    """Keyframes change the strength of a hook LoRA. Caches that were made with another strength are not used."""
    positive = hooked(trained, {n / len(strengths): strength for n, strength in enumerate(strengths)})
    own, without = trained.drawn(trained.model, positive=positive), trained.drawn(trained.model)
    assert float((own - without).norm() / own.norm()) > 0.02, "the LoRA does something"
    assert trained.error(positive=positive) < 2 * plain
    assert stats_of(trained.merged).merged_in.total() >= 2


def test_a_step_whose_weights_are_new_is_full(trained: Trained, usual: dict[int, float], stats_of: Any) -> None:
    sampling = trained.model.get_model_object("model_sampling")
    sigmas = calculate_sigmas(sampling, "simple", trained.steps)
    for step in usual:
        between = float(sigmas[step - 1] + sigmas[step]) / 2
        start = next(n / 1000 for n in range(1001) if sampling.percent_to_sigma(n / 1000) < between)
        trained.drawn(trained.merged, positive=hooked(trained, {0.0: 1.0, start: 0.5}))
        assert step not in stats_of(trained.merged).merged_steps


def test_a_latent_that_another_node_changes(trained: Trained, plain: float, stats_of: Any) -> None:
    """A wrapper shifts the latent between sampler and model, by a different amount in each step."""

    def rolled(executor: Any, x: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        places = round(40 * float(timestep.flatten()[0]))
        return executor(x.roll(places, -1), timestep, *args, **kwargs).roll(-places, -1)

    rolled.__module__ = "custom_nodes.another"
    add = lambda model: model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "another", rolled)  # noqa: E731
    assert error_of(trained, add) < 2 * plain
    assert "new_noise" in why_full(stats_of(trained.merged))


@loop("when", [(3,), (1, 2, 3, 4)])
def test_new_noise_within_a_step_is_no_tile(
    trained: Trained, plain: float, usual: dict[int, float], stats_of: Any, when: tuple[int, ...]
) -> None:
    """In the steps of `when`, the sampler takes the mean of two evaluations with different noise."""

    def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        generator = torch.Generator().manual_seed(6)
        for step in range(len(sigmas) - 1):
            level = sigmas[step].expand(len(x))
            denoised = model(x, level, **extra_args)
            if step in when:
                noise = torch.randn(x.shape, generator=generator)
                again = (1 - sigmas[step]) * denoised + sigmas[step] * noise
                denoised = (denoised + model(again, level, **extra_args)) / 2
            callback({"i": step, "x": x, "denoised": denoised})
            x = step_euler(x, denoised, sigmas, step)
        return x

    assert trained.error(function) < 2 * plain
    stats = stats_of(trained.merged)
    assert len(set(usual) - set(stats.merged_steps)) <= len(when)
    assert "tiles" not in {reason.id.value for reason in (*stats.full_reasons, *stats.unmerged)}
