"""Test samplers that report no steps, combined with a node that changes the noise levels that the model gets."""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy.samplers import KSAMPLER

from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced, custom_sampled

STEPS = 20


@loop(("change", "evaluations"), [("0.9", 1), ("0.9", 2), ("0.6", 1), ("wave", 1), ("wave", 2)])
def test_as_many_steps_are_merged_as_where_they_are_reported(
    change: str, evaluations: int, flux: Any, stats_of: Any
) -> None:
    merged = balanced(flux)

    def run(reports: bool) -> Any:
        def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
            for step in range(STEPS):
                wave = 1 - 0.1 * math.sin(math.pi * step / STEPS)
                factor = wave if change == "wave" else float(change) if 0 < step < STEPS - 1 else 1.0
                for n in range(evaluations):
                    sigma = sigmas[step + n] if step + n < STEPS else sigmas[step]
                    denoised = model(x, (factor * sigma).expand(len(x)), **extra_args)
                if reports:
                    callback({"i": step, "x": x, "denoised": denoised})
                x = denoised + (x - denoised) * sigmas[step + 1] / sigmas[step]
            return x

        custom_sampled(merged, KSAMPLER(function), torch.linspace(1, 0, STEPS + 1), HEIGHT, WIDTH)
        return stats_of(merged)

    told = run(True)
    merged_then = len(told.merged_steps), told.merged_evaluations
    untold = run(False)
    assert merged_then[0] >= 12
    assert len(untold.merged_steps) >= merged_then[0] - 1
    assert untold.merged_evaluations >= 0.75 * merged_then[1]
