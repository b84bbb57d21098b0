"""Test the report of a run, as one line for the log and as several lines, and the English text of messages."""

from collections.abc import Sequence
from typing import Any

import pytest

from scripts.comfy_pack import pack_module
from tests.loop import loop

report_text = pack_module("nodes.adapters.report_text")
core = pack_module("toma_core")
Line, Reason = report_text.Line, pack_module("toma_core.reasons").Reason
RunStats = pack_module("toma_core.stats").RunStats


def stats_of(ratios: Sequence[float], merged: dict[str, Sequence[int]]) -> Any:
    """Return stats of a run. ratios: the ratio of each step. merged: by block, the steps in which it was merged."""
    stats = RunStats(total_steps=len(ratios))
    for step, ratio in enumerate(ratios):
        stats.count_evaluation(step, ratio)
    for block, steps in merged.items():
        for step in steps:
            stats.merged(block, step)
    return stats


def stats_of_a_run() -> Any:
    """Return stats of six steps, four of them merged. The block middle.0 is never merged. The block input.2 is merged,
    except for its part attn2."""
    stats = stats_of((0.0, 0.5, 0.5, 0.0, 0.25, 0.25), dict.fromkeys(("input.10", "input.2"), (1, 2, 4, 5)))
    stats.count_evaluation(1, 0.5)
    stats.count_plan((32, 32), 512, selected=True)
    stats.count_plan((64, 64), 2048, selected=True)
    stats.count_plan((64, 64), 2048, selected=False)
    stats.not_merged("middle.0", Reason.SKIP_FIRST_BLOCKS(count=1))
    stats.not_merged("input.2", Reason.ATTENTION_PATCH(), "attn2")
    return stats


def test_consecutive_blocks_are_a_range() -> None:
    stats = stats_of_a_run()
    for name in ("output.0", "output.1", "output.2", "output.4", "output.9.0", "output.9.1", "refiner"):
        stats.not_merged(name, Reason.TOKENS_CHANGED())
    assert f"({Reason.TOKENS_CHANGED()}): output.0-2, output.4, output.9.0-1, refiner;" in report_text.summary(stats)


def test_several_lines_for_a_reader_and_one_line_for_the_log() -> None:
    stats = stats_of_a_run()
    lines = [
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
    assert [str(line) for line in report_text.report(stats)] == lines
    assert report_text.summary(stats) == "; ".join([lines[0][:-1], *(each[2:] for each in lines if each[:1] == " ")])
    ids = [line if isinstance(line, str) else line.id.value for line in report_text.report(stats)]
    assert ids[:4] == ["sentence", "", "where", "indented"]


def test_the_headline_counts_blocks_alone() -> None:
    """The headline counts neither calls of the model nor reference images as blocks."""
    stats = stats_of([1 / 3], {f"double {n}": [0] for n in range(7)})
    stats.call_not_merged(Reason.OUT_OF_MEMORY())
    stats.not_merged(None, Reason.TOO_FEW_TOKENS(least=9), "reference 2")
    stats.not_merged("double 3", Reason.ATTENTION_PATCH(), "attention")
    assert str(report_text.headline(stats)) == "On: 33 % of the tokens merged, 7 of 7 blocks, 1 of 1 steps"
    lines = report_text.details(stats)
    assert Line.UNMERGED_CALLS(reason=Reason.OUT_OF_MEMORY()) in lines
    assert Line.UNMERGED(reason=Reason.TOO_FEW_TOKENS(least=9), blocks="reference 2") in lines
    assert Line.UNMERGED(reason=Reason.ATTENTION_PATCH(), blocks="double 3 attention") in lines


def test_a_block_counts_for_the_steps_in_which_it_was_merged() -> None:
    """A step counts as merged if at least one block was merged in it."""
    stats = stats_of((0.0, *[0.5] * 5), {"double.0": (1, 3, 4), "double.1": [3], "double.2": [3]})
    for block in ("double.1", "double.2"):
        stats.not_merged(block, Reason.ATTENTION_PATCH())
    # Step 3 merged three blocks, and steps 1 and 4 merged one block each: 5 / 3 blocks per step, rounded.
    assert str(report_text.headline(stats)) == "On: 50 % of the tokens merged, 2 of 3 blocks, 3 of 6 steps"
    lines = set(map(str, report_text.details(stats)))
    assert {"merged steps: 2, 4-5, at ratio 0.5", "full steps: 1", "model evaluations: 6, merged: 3"} <= lines
    stats.discard_evaluations(3, 1, 1)
    assert stats.merged_blocks == {"double.0"}
    assert str(report_text.headline(stats)).startswith("On: 50 % of the tokens merged, 1 of 3 blocks, 2 of 6 steps.")


def test_the_reason_that_concerns_most_comes_first() -> None:
    stats, few = RunStats(), Reason.TOO_FEW_TOKENS(least=256)
    stats.not_merged("output.5", Reason.SKIP_LAST_BLOCKS(count=1))
    for n in range(4):
        stats.not_merged(f"input.{n}", few)
    assert report_text.headline(stats) == Line.NOTHING_MERGED(reason=few)
    assert report_text.summary(stats).startswith(f"Nothing was merged: {few}; ")


def test_other_blocks_are_in_the_headline_unless_the_user_chose_so() -> None:
    stats = stats_of([0.5], {"input.0": [0]})
    for n in range(1, 5):
        stats.not_merged(f"input.{n}", Reason.SKIP_FIRST_BLOCKS(count=4))
    assert report_text.headline(stats).id is Line.ON
    stats.not_merged("input.5", Reason.BLOCK_REPLACED())
    assert dict(report_text.headline(stats).params)["reason"] == Reason.BLOCK_REPLACED()


def test_a_run_that_merged_nothing_says_why() -> None:
    stats, interval = RunStats(), (Reason.SETTING(setting="full_step_interval", value=2),)
    assert report_text.headline(stats) == Line.NOTHING_MERGED(reason=Reason.EVERY_STEP_FULL())
    few = Reason.TOO_FEW_STEPS()
    for full_by, reason in ((interval, Reason.EVERY_STEP_FULL_BY(by=interval)), ((few,), few)):
        stats.full_by = full_by
        assert report_text.headline(stats) == Line.NOTHING_MERGED(reason=reason)
    unknown_model = Reason.UNKNOWN_MODEL(model="X")
    stats.call_not_merged(unknown_model)
    assert report_text.headline(stats) == Line.NOTHING_MERGED(reason=unknown_model)
    assert str(Line.UNMERGED_CALLS(reason=unknown_model)) in report_text.summary(stats)
    assert Line.WHERE() not in report_text.report(stats)


def test_memory_is_reported() -> None:
    stats = RunStats()
    stats.merged("single.3", 0)
    assert "cache" not in report_text.summary(stats)
    stats.cache_bytes = 41_900_000
    assert "KV cache of 41.9 MB" in report_text.summary(stats)


def test_text_comes_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = {"kv_too_large": "{needed:.1f} of {limit}", "setting": "{setting}: {value} {label.ratio}"}
    monkeypatch.setattr(report_text, "ENGLISH", {"labels": {"ratio": "share"}, "messages": messages})
    assert str(Reason.KV_TOO_LARGE(needed=7.26, limit=2.0)) == "7.3 of 2"
    assert str(Reason.SETTING(setting="ratio", value=0.5)) == "share: 0.5 share"
    inner = Reason.KV_TOO_LARGE(needed=1, limit=2)
    nested = Reason.SETTING(setting="steps", value=(3, inner))
    assert str(nested) == "steps: 3, 1.0 of 2 share"
    json_of = pack_module("toma_core.reasons").json_of
    assert json_of(nested)["params"]["value"] == [3, json_of(inner)]


@loop(
    ("values", "text"),
    [
        ({"ratio": True}, "ratio is True. Allowed: a number from 0 to 0.95. Try 0.5."),
        ({"granularity": "x"}, "granularity is 'x'. Allowed: module, block, stack. Choose one of them."),
        (
            {"start_percent": 0.6, "end_percent": 0.5},
            "Start percent (0.6) is larger than end percent (0.5), so nothing would be merged. Lower start percent or "
            "raise end percent.",
        ),
    ],
)
def test_errors_are_sentences(values: dict[str, Any], text: str) -> None:
    with pytest.raises(core.ConfigError) as refused:
        core.ToMAConfig(**values)
    assert str(refused.value) == f"ToMA: {text}"
