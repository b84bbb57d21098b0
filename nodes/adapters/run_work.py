"""Count how much less a run computed than without merging, from shapes alone: nothing is measured in a step."""

from __future__ import annotations

from torch import Tensor, nn

from . import registry
from .sampling_run import SamplingRun


def times_less_work(model: nn.Module, latent: Tensor, sampling: SamplingRun) -> float | None:
    """Return the FLOPs of the unmerged run over those of this one, for a latent of (B, C, ..., H, W).

    None where nothing was merged, and where the model saw tiles of the latent or reference images, whose tokens stay.
    Plans are not counted; text beyond what a family always has is not either.
    """
    stats, schedule, hooks = sampling.run.stats, sampling.run.schedule, registry.find(model)
    if hooks is None or sampling.run.tiles or sampling.run.references or not stats.merged_blocks:
        return None
    facts, merged_in = list(hooks.blocks(latent)), stats.merged_in
    every = (hooks.flops_beside_blocks(latent) + sum(fact.flops() for fact in facts)) * stats.evaluations
    saved = 0.0
    for step, ratio in stats.merged_steps.items():
        by_block = schedule.ratios_at(0.0, step) if schedule.sigmas else None  # None: the same for all
        for fact in facts:
            if fact.name in stats.merged_blocks:
                share = ratio if by_block is None else by_block.get(fact.name, 0.0)
                saved += (fact.flops() - fact.flops(share, sampling.run.kv_cache)) * merged_in[step]
    return every / (every - saved) if 0 < saved < every else None
