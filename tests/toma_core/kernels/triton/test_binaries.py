"""Test that all Triton binaries that a run needs are compiled at its first plan, on a simulated GPU."""

import json
from pathlib import Path

from tests.toma_core.kernels.cases import printed

PROGRAM = """
import json, logging, sys
import torch
import toma_core.kernels.dispatch as trial
from testbed import offline
from tests.toma_core.plans import plan_for
from toma_core import Evaluation, Facts, RunState, Schedule, UserSettings, decide, reduce, restore
from toma_core.kernels.triton import product, select
from toma_core.latent_regression import LatentChange, Rotation
from toma_core.pipeline import Cached

# No kernel runs. Fresh memory is filled with 0, and every trial of a kernel succeeds.
empty = torch.empty
torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).zero_()
trial._obstacle = lambda *args: ""
trial._close = lambda *args: True
KERNELS = (select._select_kernel, product._change_kernel, product._merge_kernel, product._unmerge_kernel)

def run(preset, grids, steps=12, **settings):
    config = UserSettings(preset, settings).resolved()
    schedule = Schedule(config, tuple(float(steps - step) for step in range(steps)))
    state, counts, propagated = RunState(schedule), [], False
    for sigma in schedule.sigmas:
        decision, first = decide(state, Facts(sigma, conditions={"c": None, "u": None})), grids[0]
        shown = (torch.zeros(1, 16, *first[:2]),) * 2 if config.uses_cache else ()
        latent = torch.ones(2, 4, *grids[0][:2])
        moved = LatentChange(latent, 0 * latent)
        where = Evaluation(state, decision, (None, None), ("c", "u"), pictures=shown, change=moved)
        for height, width, channels in grids:
            x = torch.zeros(2, height * width, channels, dtype=torch.bfloat16)
            plan, detail = plan_for(x, (height, width), "a", where), where.cached("a", x)
            reduced = reduce(x, plan, detail)
            y = restore(reduced + 0, reduced, x, plan, detail)
            assert y.shape == x.shape
            if state.kv_cache and isinstance(detail, Cached):
                assert detail.change.regression(plan) is not None
                R = torch.zeros(1, plan.tokens, 1, 64, 2, 2)
                keys = Rotation.of(R, R[:, : reduced.shape[1]], reduced)
                detail.propagate(detail.propagate(reduced, plan)[:, : reduced.shape[1]], plan, keys)
                propagated = True
        if plan is not None:
            counts.append(len(offline.binaries(*KERNELS)))
    assert propagated == state.kv_cache
    return counts

with offline.stubbed(), torch.inference_mode():
    counts = {"sdxl": run("balanced", [(64, 64, 640), (32, 32, 1280)])}
    counts["sdxl 832x1216"] = run("balanced", [(52, 76, 640), (26, 38, 1280)])
    counts["sdxl weighed apart"] = run("balanced", [(64, 64, 640)], selection_interval=4, weight_interval=2)
    counts["flux"] = run("balanced", [(64, 64, 3072)], full_step_interval=3)
    counts["flux 832x1216"] = run("balanced", [(52, 76, 3072)], full_step_interval=3)
    moving = dict(window_size=4, selection_interval=1, weight_interval=1)
    counts["moved"] = run("balanced", [(64, 64, 3072)], full_step_interval=4, **moving)
    counts["moved 832x1216"] = run("balanced", [(52, 76, 3072)], full_step_interval=4, **moving)
print(json.dumps(counts))
"""


def test_no_kernel_is_made_after_the_first_plan(tmp_path: Path) -> None:
    """Binaries for shifted windows and the residual cache are compiled at the first plan, long before their use."""
    counts = json.loads(printed(PROGRAM, tmp_path))
    for name, steps in counts.items():
        assert len(set(steps)) == 1, (name, steps)
    # SDXL needs six binaries: search, merge and restore, each for full windows and for ragged windows. A KV cache adds
    # binaries of the kernels for change and propagation, each with rotations and without.
    assert counts["sdxl"][0] == counts["sdxl 832x1216"][0] == 6
    assert counts["flux"][0] == counts["flux 832x1216"][0]
