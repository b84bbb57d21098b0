"""The stats of a run: correct counts, one line for the log, and lines for readers."""

from __future__ import annotations

from tests.loop import loop
from toma_core.reasons import Reason
from toma_core.stats import Line, RunStats


def stats_of_a_run() -> RunStats:
    """Return stats of six steps, four merged, with 64x64 and 32x32 tokens, one unmerged and one partly merged block."""
    stats = RunStats(total_steps=6)
    for step, ratio in enumerate((0.0, 0.5, 0.5, 0.0, 0.25, 0.25)):
        stats.count_evaluation(step, ratio)
    stats.count_evaluation(1, 0.5)
    stats.count_plan((32, 32), 512, selected=True)
    stats.count_plan((64, 64), 2048, selected=True)
    stats.count_plan((64, 64), 2048, selected=False)
    for block in ("input.10", "input.2"):
        for step in (1, 2, 4, 5):
            stats.merged(block, step)
    stats.not_merged("middle.0", Reason.SKIP_FIRST_BLOCKS(count=1))
    stats.not_merged("input.2", Reason.ATTENTION_PATCH(), "attn2")
    return stats


def test_counters() -> None:
    stats = stats_of_a_run()
    assert (stats.evaluations, stats.merged_evaluations) == (7, 5)
    assert stats.steps == set(range(6))
    assert stats.merged_steps == {1: 0.5, 2: 0.5, 4: 0.25, 5: 0.25}
    assert (stats.selections, stats.weighings) == (2, 3)
    assert stats.blocks == {"input.10", "input.2", "middle.0"}, "a part counts as its block"


def test_one_line_for_the_log() -> None:
    assert stats_of_a_run().summary() == (
        "On: 38 % of the tokens merged, 2 of 3 blocks, 4 of 6 steps; tokens: 4096 -> 2048 (64 x 64), 1024 -> 512 "
        "(32 x 32); merged blocks: input.2, input.10; merged steps: 2-3, 5-6, at ratio 0.5, 0.25; full steps: 1, 4; "
        "model evaluations: 7, merged: 5; not merged (skip first blocks = 1): middle.0; not merged (an attention patch "
        "of another custom node needs all tokens): input.2 attn2; 2 selections, 3 weightings"
    )


def test_consecutive_blocks_are_a_range() -> None:
    stats = stats_of_a_run()
    for name in ("output.0", "output.1", "output.2", "output.4", "output.9.0", "output.9.1", "refiner"):
        stats.not_merged(name, Reason.TOKENS_CHANGED())
    assert f"({Reason.TOKENS_CHANGED()}): output.0-2, output.4, output.9.0-1, refiner;" in stats.summary()


def test_several_lines_for_a_reader() -> None:
    stats = stats_of_a_run()
    assert stats.text().splitlines() == [
        "On: 38 % of the tokens merged, 2 of 3 blocks, 4 of 6 steps.",
        "",
        "Where",
        "  tokens: 4096 -> 2048 (64 x 64), 1024 -> 512 (32 x 32)",
        "  merged blocks: input.2, input.10",
        "",
        "When",
        "  merged steps: 2-3, 5-6, at ratio 0.5, 0.25",
        "  full steps: 1, 4",
        "  model evaluations: 7, merged: 5",
        "",
        "Not merged",
        "  not merged (skip first blocks = 1): middle.0",
        "  not merged (an attention patch of another custom node needs all tokens): input.2 attn2",
        "",
        "How",
        "  2 selections, 3 weightings",
    ]
    assert [line if isinstance(line, str) else line.id.value for line in stats.report()][:4] == [
        *("sentence", "", "where", "indented")
    ]


@loop(("ratio", "words"), [(0.25, "25 %"), (1 / 3, "33 %"), (0.95, "95 %")])
def test_the_headline_names_the_shares(ratio: float, words: str) -> None:
    stats = RunStats(total_steps=2)
    for step in range(2):
        stats.count_evaluation(step, ratio)
        stats.merged("input.1", step)
    assert str(stats.headline()) == f"On: {words} of the tokens merged, 1 of 1 blocks, 2 of 2 steps"


def test_the_headline_counts_blocks_alone() -> None:
    """Neither the model nor a reference image is a block, and names of blocks may have spaces."""
    stats = RunStats(total_steps=1)
    stats.count_evaluation(0, 0.5)
    for n in range(7):
        stats.merged(f"double {n}", 0)
    stats.call_not_merged(Reason.OUT_OF_MEMORY())
    stats.reference_not_merged(2, Reason.TOO_FEW_TOKENS(least=9))
    stats.not_merged("double 3", Reason.ATTENTION_PATCH(), "attention")
    assert str(stats.headline()) == "On: 50 % of the tokens merged, 7 of 7 blocks, 1 of 1 steps"
    assert Line.UNMERGED_CALLS(reason=Reason.OUT_OF_MEMORY()) in stats.details()
    assert Line.UNMERGED(reason=Reason.TOO_FEW_TOKENS(least=9), blocks="reference 2") in stats.details()
    assert Line.UNMERGED(reason=Reason.ATTENTION_PATCH(), blocks="double 3 attention") in stats.details()


def test_a_block_counts_for_the_steps_in_which_it_was_merged() -> None:
    """A step counts as merged if some block was merged in it."""
    stats = RunStats(total_steps=6)
    for step in range(6):
        stats.count_evaluation(step, 0.5 if step else 0.0)
    for step in (1, 3, 4):
        stats.merged("double.0", step)
    for block in ("double.1", "double.2"):
        stats.merged(block, 3)
        stats.not_merged(block, Reason.ATTENTION_PATCH())
    # Five pairs in three steps.
    assert str(stats.headline()) == "On: 50 % of the tokens merged, 2 of 3 blocks, 3 of 6 steps"
    lines = list(map(str, stats.details()))
    assert "merged steps: 2, 4-5, at ratio 0.5" in lines
    assert "full steps: 1" in lines
    assert "model evaluations: 6, merged: 3" in lines
    stats.discard_evaluations(3, 1, 1)
    assert stats.merged_blocks == {"double.0"}
    assert str(stats.headline()).startswith("On: 50 % of the tokens merged, 1 of 3 blocks, 2 of 6 steps.")


def test_the_reason_that_concerns_most_comes_first() -> None:
    stats, few = RunStats(), Reason.TOO_FEW_TOKENS(least=256)
    stats.not_merged("output.5", Reason.SKIP_LAST_BLOCKS(count=1))
    for n in range(4):
        stats.not_merged(f"input.{n}", few)
    assert stats.headline() == Line.NOTHING_MERGED(reason=few)
    assert stats.summary().startswith(f"Nothing was merged: {few}; ")


def test_other_blocks_are_in_the_headline_unless_the_user_chose_so() -> None:
    stats = RunStats(total_steps=1)
    stats.count_evaluation(0, 0.5)
    stats.merged("input.0", 0)
    for n in range(1, 5):
        stats.not_merged(f"input.{n}", Reason.SKIP_FIRST_BLOCKS(count=4))
    assert stats.headline().id is Line.ON
    stats.not_merged("input.5", Reason.BLOCK_REPLACED())
    assert dict(stats.headline().params)["reason"] == Reason.BLOCK_REPLACED()


def test_a_run_that_merged_nothing_says_why() -> None:
    stats = RunStats()
    assert stats.headline() == Line.NOTHING_MERGED(reason=Reason.EVERY_STEP_FULL())
    stats.full_by = (Reason.SETTING(setting="full_step_interval", value=2),)
    assert stats.headline() == Line.NOTHING_MERGED(reason=Reason.EVERY_STEP_FULL_BY(by=stats.full_by))
    stats.full_by = (Reason.TOO_FEW_STEPS(),)
    assert stats.headline() == Line.NOTHING_MERGED(reason=Reason.TOO_FEW_STEPS())
    unknown = Reason.UNKNOWN_MODEL(model="X")
    stats.call_not_merged(unknown)
    assert stats.headline() == Line.NOTHING_MERGED(reason=unknown)
    assert str(Line.UNMERGED_CALLS(reason=unknown)) in stats.summary()
    assert Line.WHERE() not in stats.report()
