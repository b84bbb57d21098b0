"""Every size, batch, guidance and sampler gives a finite latent, and each evaluation counts for the right step."""

from typing import Any

import pytest
import torch

from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import every_kind

# By sampler: for each evaluation of a four-step run, the step for which it counts. Heun's second evaluation is at the
# next step's sigma, and counts for that step. Second-order singlestep samplers also evaluate between the sigmas of two
# steps. These evaluations count for the earlier step.
STEPS = {
    **dict.fromkeys(("euler", "dpmpp_2m", "uni_pc", "lcm"), (0, 1, 2, 3)),
    "heun": (0, 1, 1, 2, 2, 3, 3),
    **dict.fromkeys(("dpmpp_2s_ancestral", "dpmpp_sde"), (0, 0, 1, 1, 2, 2, 3)),
}
SAMPLERS = list(STEPS)


def steps_of(sampler: str, model: Any) -> list[int]:
    """Return the expected step of each evaluation. With a UNet, `dpmpp_2s_ancestral` has midpoints that count as in
    `heun`."""
    flow = hasattr(model.model.diffusion_model, "double_blocks")
    return list(STEPS["heun" if sampler == "dpmpp_2s_ancestral" and not flow else sampler])


# Latent sizes: the buckets of SDXL at a quarter of their sides, two buckets at full size, odd and tiny sizes, single
# rows and columns, and sizes of Flux.
UNET_SIZES = [
    (32, 32), (36, 28), (26, 38), (38, 26), (24, 42), (42, 24), (20, 48), (52, 76),
    (33, 31), (7, 9), (2, 2), (1, 1), (1, 64), (64, 1), (3, 40), (5, 5),
]  # fmt: skip
FLUX_SIZES = [(32, 32), (26, 38), (40, 24), (33, 47), (1, 1), (1, 64), (64, 1), (3, 2), (52, 76), (104, 152)]


SIZES = [("unet", *each) for each in enumerate(UNET_SIZES)] + [("flux", *each) for each in enumerate(FLUX_SIZES, 3)]


@loop(("kind", "index", "size"), SIZES, ids=str)
def test_sizes(model: Any, size: tuple[int, int], index: int, attach: Any, stats_of: Any, decisions: Any) -> None:
    batch, cfg, sampler = 1 + index % 3, (1.0, 7.0)[index % 2], SAMPLERS[index % 7]
    granularity = ("stack", "module", "block")[index % 3]
    patched = attach(model, granularity=granularity, ratio=(0.5, 0.3, 0.75)[index % 3])
    out = models.sample(patched, *size, batch=batch, cfg=cfg, sampler=sampler, steps=2 if sum(size) > 90 else 4)
    assert out.shape == (batch, model.model.latent_format.latent_channels, *size)
    assert out.isfinite().all()
    if sum(size) <= 90:
        assert [d.step for d in decisions] == steps_of(sampler, model)
    stats = stats_of(patched)
    assert all(stats.merged_blocks or h * w < 4 for h, w in stats.grids)


@pytest.mark.compat
@loop("sampler", SAMPLERS)
@every_kind
def test_samplers_and_their_steps(model: Any, attach: Any, stats_of: Any, decisions: Any, sampler: str) -> None:
    model, steps = attach(model, selection_interval=2, weight_interval=1), steps_of(sampler, model)
    out = models.sample(model, 16, 16, steps=4, sampler=sampler, scheduler="normal")
    assert out.isfinite().all()
    assert [d.step for d in decisions] == steps
    assert [d.selection for d in decisions] == [step // 2 for step in steps]
    assert [d.weighing for d in decisions] == steps
    stats = stats_of(model)
    assert stats.total_steps == 4
    assert set(stats.merged_steps) == {0, 1, 2, 3}
    scopes = 2
    assert (stats.selections, stats.weighings) == (2 * scopes, 4 * scopes)


@every_kind
@loop("scheduler", ["normal", "karras", "simple", "sgm_uniform", "beta", "ddim_uniform"])
def test_range_counts_noise(model: Any, attach: Any, stats_of: Any, decisions: Any, scheduler: str) -> None:
    """With every scheduler, steps are merged in the first half of the noise schedule."""
    middle = float(model.get_model_object("model_sampling").percent_to_sigma(0.5))
    model, levels = attach(model, end_percent=0.5), list[float]()

    def note(args: dict[str, Any]) -> torch.Tensor:
        levels.append(float(args["sigma"].flatten()[0]))
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(note)
    models.sample(model, 16, 16, steps=6, scheduler=scheduler)
    assert [d.ratio for d in decisions] == [0.5 if level > middle else 0.0 for level in levels]
    assert {d.ratio for d in decisions} == {0.0, 0.5}
    assert stats_of(model).steps == set(range(len(levels)))


@every_kind
def test_part_of_a_schedule_keeps_its_clock(model: Any, attach: Any, decisions: Any) -> None:
    """KSamplerAdvanced runs steps 2 and 3 of 6, which ToMA counts as steps 0 and 1."""
    models.sample(attach(model, full_step_interval=2), 16, 16, steps=6, start_step=2, last_step=4)
    assert [(d.step, d.merged_ratio) for d in decisions] == [(0, 0.0), (1, 0.5)]
