"""What a run tells: counts that are right, one line for the log, and lines for a reader."""

from __future__ import annotations

import threading

import pytest

from toma_core.stats import RunStats


def stats_of_a_run() -> RunStats:
    """Four of six steps merged, 64x64 and 32x32 tokens, one block whole and one only in part."""
    stats = RunStats(total_steps=6)
    for step, ratio in enumerate((0.0, 0.5, 0.5, 0.0, 0.25, 0.25)):
        stats.count_evaluation(step, ratio)
    stats.count_evaluation(1, 0.5)
    stats.count_plan((32, 32), 512, selected=True)
    stats.count_plan((64, 64), 2048, selected=True)
    stats.count_plan((64, 64), 2048, selected=False)
    for block in ("input.10", "input.2"):
        stats.merged(block)
    stats.whole("middle.0", "as configured")
    stats.whole("input.2 attn2", "an attention mask")
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
        "4096 -> 2048 tokens (64x64), 1024 -> 512 tokens (32x32) in 2/3 blocks, 4/6 steps, 2 selections, 3 weighings; "
        "unmerged (as configured): middle.0; unmerged (an attention mask): input.2 attn2"
    )


def test_a_long_list_is_shortened() -> None:
    stats = stats_of_a_run()
    for n in range(9):
        stats.whole(f"output.{n}", "a mask")
    assert "unmerged (a mask): output.0, output.1, output.2 and 6 more" in stats.summary()
    assert "output.8" in stats.text()


def test_several_lines_for_a_reader() -> None:
    stats = stats_of_a_run()
    assert stats.text().splitlines() == [
        "On: 38 % of the tokens merged, 2 of 3 blocks, 4 of 6 steps.",
        "",
        "Where",
        "  tokens: 4096 -> 2048 tokens (64x64), 1024 -> 512 tokens (32x32)",
        "  merged blocks: input.2, input.10",
        "",
        "When",
        "  merged steps: 2-3, 5-6, at ratio 0.5, 0.25",
        "  full steps: 1, 4",
        "  model evaluations: 7, merged: 5",
        "",
        "Unmerged",
        "  unmerged (as configured): middle.0",
        "  unmerged (an attention mask): input.2 attn2",
        "",
        "How",
        "  2 selections, 3 weighings",
    ]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        *((0.25, "a quarter"), (1 / 3, "a third"), (0.5, "half"), (2 / 3, "two thirds"), (0.75, "three quarters")),
        *((0.4, "40 %"), (0.95, "95 %")),
    ],
)
def test_the_headline_names_the_share_and_what_is_complete(ratio: float, words: str) -> None:
    stats = RunStats(total_steps=2)
    for step in range(2):
        stats.count_evaluation(step, ratio)
    stats.merged("input.1")
    assert stats.headline() == f"On: {words} of the tokens merged, all 1 blocks, all 2 steps"


def test_the_numbers_stand_behind_the_headline() -> None:
    assert stats_of_a_run().numbers().splitlines() == [
        "Tokens: 4096 -> 2048 (64 x 64), 1024 -> 512 (32 x 32)",
        "Merged steps: 2-3, 5-6",
        "Full steps: 1, 4",
        "Unmerged parts: 1, as configured",
        "Unmerged parts: 1, an attention mask",
    ]


def test_the_reason_that_concerns_most_comes_first() -> None:
    stats = RunStats()
    stats.whole("output.5", "whole_last = 1")
    for n in range(4):
        stats.whole(f"input.{n}", "fewer than 256 tokens")
    assert stats.headline() == "Nothing was merged: fewer than 256 tokens"
    assert stats.summary() == "nothing was merged: fewer than 256 tokens; whole_last = 1"


def test_a_run_that_merged_nothing_says_why() -> None:
    stats = RunStats()
    settings = "start percent, end percent, full step every, compare tokens by, profile"
    assert stats.summary() == f"nothing was merged: every step ran in full ({settings})"
    stats.whole("model", "a model or latent of unknown kind")
    assert stats.summary() == "nothing was merged: a model or latent of unknown kind"
    assert "merged blocks: none" in stats.text()


def test_counting_from_several_threads_loses_nothing() -> None:
    stats = RunStats()

    def work() -> None:
        for step in range(300):
            stats.count_evaluation(step, 0.5)
            stats.count_plan((4, 4), 8, selected=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stats.evaluations, stats.merged_evaluations, stats.selections, stats.weighings) == (1200,) * 4
