"""What a run tells: counts that are right, one line for the log, and lines for a reader."""

from __future__ import annotations

import threading

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
    stats.whole("middle.0", "left whole as configured")
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
        "left whole (left whole as configured): middle.0; left whole (an attention mask): input.2 attn2"
    )


def test_a_long_list_is_shortened() -> None:
    stats = stats_of_a_run()
    for n in range(9):
        stats.whole(f"output.{n}", "a mask")
    assert "left whole (a mask): output.0, output.1, output.2 and 6 more" in stats.summary()
    assert "output.8" in stats.text()


def test_several_lines_for_a_reader() -> None:
    lines = stats_of_a_run().text().splitlines()
    assert lines[2:] == [
        "merged steps: 2-3, 5-6, at ratio 0.5, 0.25",
        "whole steps: 1, 4",
        "model evaluations: 7, merged: 5",
        "merged blocks: input.2, input.10",
        "left whole (left whole as configured): middle.0",
        "left whole (an attention mask): input.2 attn2",
    ]
    assert lines[0] == stats_of_a_run().summary()


def test_a_run_that_merged_nothing_says_why() -> None:
    stats = RunStats()
    assert (
        stats.summary()
        == "nothing was merged: every step ran whole (start percent, end percent, whole every, plan from)"
    )
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
