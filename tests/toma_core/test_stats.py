from toma_core.reasons import Reason
from toma_core.stats import RunStats


def test_counters() -> None:
    stats = RunStats()
    for step, ratio in ((0, 0.0), (1, 0.5), (2, 0.25), (1, 0.5)):
        stats.count_evaluation(step, ratio)
    for selected in (True, True, False):
        stats.count_plan((64, 64), 2048, selected=selected)
    stats.merged("input.10", 1)
    stats.not_merged("middle.0", Reason.SKIP_FIRST_BLOCKS(count=1))
    stats.not_merged("input.10", Reason.ATTENTION_PATCH(), "attn2")
    assert (stats.evaluations, stats.merged_in.total()) == (4, 3)
    assert (stats.steps, stats.merged_steps) == ({0, 1, 2}, {1: 0.5, 2: 0.25})
    assert (stats.selections, stats.weighings) == (2, 3)
    assert stats.blocks == {"input.10", "middle.0"}, "a part counts as its block"
    assert (stats.merged_blocks, stats.ratios_in_blocks) == ({"input.10"}, {1: 0.5})
    stats.discard_evaluations(1, 2, 2)
    assert (stats.evaluations, stats.merged_blocks, stats.merged_steps) == (2, set(), {2: 0.25})
