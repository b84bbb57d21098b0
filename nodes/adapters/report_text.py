"""Describe a run in messages, for the node, the report and the log, and format messages in English."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any

from ...toma_core import ToMAConfig, reasons
from ...toma_core.reasons import Message, MessageId, Reason
from ...toma_core.stats import RunStats

# Labels of settings, by the setting's id, and texts of messages, by the message's id.
ENGLISH = json.loads((Path(__file__).parents[2] / "web" / "i18n" / "en.json").read_text(encoding="utf-8"))
# Reasons that follow from the user's own setting or profile.
_CHOSEN = {Reason.SETTING, Reason.SKIP_FIRST_BLOCKS, Reason.SKIP_LAST_BLOCKS, Reason.PROFILE_SKIPS_BLOCK}


class Line(MessageId):
    """The lines of a report. The comment at each id names the parameters of its text."""

    NO_NODE = "no_toma_node"
    NO_RUN = "no_run_of_model"
    NOTHING_MERGED = "nothing_merged"  # reason
    ON = "on"  # parameters: share, merged_blocks, blocks, merged_steps, steps
    ON_OTHERS = "on_others"  # line, reason
    WORK = "work"  # percent
    SENTENCE = "sentence"  # sentence
    INDENTED = "indented"  # line
    PERCENT = "percent"  # value
    UP_TO = "up_to"  # share
    # titles of sections
    WHERE = "where"
    WHEN = "when"
    NOT_MERGED = "not_merged"
    HOW = "how"
    # lines of sections
    TOKENS = "tokens"  # sizes
    MERGED_BLOCKS = "merged_blocks"  # blocks
    MERGED_STEPS = "merged_steps"  # steps, ratios
    FULL_STEPS = "full_steps"  # steps
    FULL_STEPS_BY = "full_steps_by"  # steps, by: the reasons (messages) why they are full
    FULL_BY_NEED = "full_by_need"  # steps, reason
    EVALUATIONS = "evaluations"  # total, merged: numbers of evaluations
    UNMERGED = "unmerged"  # reason, blocks
    UNMERGED_CALLS = "unmerged_calls"  # reason
    PLANS = "plans"  # selections, weightings: how often each was made
    CACHE_SIZE = "cache_size"  # size: in MB
    KV_PLACE = "kv_place"  # card, main: bytes on the card and in main memory, in GB
    KV_NOT_PINNED = "kv_not_pinned"
    KV_FEWER_BLOCKS = "kv_fewer_blocks"  # percent
    ATTENTION_LEFT = "attention_left"
    KERNELS = "kernels"  # names
    COMFYUI = "comfyui"  # version
    UNTRIED_COMFYUI = "untried_comfyui"  # version, tried


def label(setting: str) -> str:
    """Return the English label of a setting, or of another input of a node."""
    return str(ENGLISH["labels"].get(setting, setting.replace("_", " ")))


class _English(Formatter):
    """Put values into a message's text. Numbers have no trailing zeros, unless the text gives a format."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, tuple):
            return ", ".join(self.format_field(each, spec) for each in value)
        return format(value, spec or (".10g" if isinstance(value, float) else ""))


def _english(message: Message) -> str:
    values = {name: label(str(value)) if name == "setting" else value for name, value in message.params}
    labels = SimpleNamespace(**{setting: label(setting) for setting in ToMAConfig.__dataclass_fields__})
    return _English().format(ENGLISH["messages"][message.id.value], label=labels, **values)


reasons.reader = _english


def headline(stats: RunStats) -> Message:
    """Return the first line: the share of merged tokens, in how many blocks and steps, or why nothing is merged."""
    unmerged = stats.unmerged_reasons()
    ratios = stats.ratios_in_blocks
    if not ratios:
        return Line.NOTHING_MERGED(reason=[*stats.unmerged_calls, *unmerged, _why_full(stats)][0])
    steps, total = len(ratios), len(stats.blocks)
    # A block that merges in only some of the merged steps counts as a fraction of a block.
    merged = max(1, round(sum(len(at & ratios.keys()) for at in stats.merged_at.values()) / steps))
    share = _at_most(stats, Line.PERCENT(value=100 * sum(ratios.values()) / steps))
    every = max(stats.total_steps, len(stats.steps))
    line = Line.ON(share=share, merged_blocks=merged, blocks=total, merged_steps=steps, steps=every)
    others = [reason for reason in unmerged if reason.id not in _CHOSEN]
    return Line.ON_OTHERS(line=line, reason=others[0]) if others and 2 * merged < total else line


def work(stats: RunStats) -> list[Message]:
    """Return a line on how many FLOPs the run saved, in percent; no line if the saving is unknown or below 5 %."""
    times = stats.times_less_work
    return [] if times is None or times < 1.05 else [Line.WORK(percent=100 - 100 / times)]


def details(stats: RunStats) -> list[Message]:
    """Return the facts behind the headline, one per line."""
    return [line for lines in _sections(stats).values() for line in lines]


def summary(stats: RunStats) -> str:
    """Return the headline and the details as one English line for the log."""
    return "; ".join(map(str, [headline(stats), *work(stats), *details(stats)]))


def report(stats: RunStats) -> list[Message | str]:
    """Return the headline and the details in titled sections: a message or an empty string for each line."""
    found: list[Message | str] = [Line.SENTENCE(sentence=line) for line in (headline(stats), *work(stats))]
    for title, lines in _sections(stats).items():
        if lines:
            found += ["", title(), *(Line.INDENTED(line=line) for line in lines)]
    return found


def _sections(stats: RunStats) -> dict[Line, list[Message]]:
    merged = stats.ratios_in_blocks
    where = list[Message]()
    when = list[Message]()
    if merged:
        more = "+" if stats.by_profile else ""
        sizes = tuple(
            f"{math.prod(grid)} -> {destinations}{more} ({' x '.join(map(str, grid))})"
            for grid, destinations in sorted(stats.grids.items(), reverse=True)
        )
        where = [Line.TOKENS(sizes=sizes), Line.MERGED_BLOCKS(blocks=_names(stats.merged_blocks))]
        ratios = tuple(dict.fromkeys(_at_most(stats, float(f"{ratio:.3g}")) for ratio in merged.values()))
        when = [Line.MERGED_STEPS(steps=_steps(merged), ratios=ratios)]
    if full := _steps(stats.steps - set(stats.merged_steps if merged else ())):
        by = stats.full_by
        when.append(Line.FULL_STEPS_BY(steps=full, by=by) if by else Line.FULL_STEPS(steps=full))
    when += [Line.FULL_BY_NEED(steps=_steps(steps), reason=why) for why, steps in stats.full_reasons.items()]
    when.append(Line.EVALUATIONS(total=stats.evaluations, merged=sum(stats.merged_in[step] for step in merged)))
    names = stats.unmerged_names()
    not_merged = [Line.UNMERGED(reason=why, blocks=_names(names[why])) for why in stats.unmerged_reasons()]
    not_merged += [Line.UNMERGED_CALLS(reason=why) for why in stats.unmerged_calls]
    return {Line.WHERE: where, Line.WHEN: when, Line.NOT_MERGED: not_merged, Line.HOW: _how(stats)}


def _why_full(stats: RunStats) -> Message:
    if stats.full_reasons:
        return max(stats.full_reasons, key=lambda reason: len(stats.full_reasons[reason]))
    if Reason.TOO_FEW_STEPS() in stats.full_by:
        return Reason.TOO_FEW_STEPS()
    return Reason.EVERY_STEP_FULL_BY(by=stats.full_by) if stats.full_by else Reason.EVERY_STEP_FULL()


def _at_most(stats: RunStats, share: Message | float) -> Message | float:
    return Line.UP_TO(share=share) if stats.by_profile else share


def _how(stats: RunStats) -> list[Message]:
    lines = [
        stats.merged_blocks and Line.PLANS(selections=stats.selections, weightings=stats.weighings),
        stats.cache_bytes and Line.CACHE_SIZE(size=stats.cache_bytes / 1e6),
        stats.kv_place[1] and Line.KV_PLACE(card=stats.kv_place[0] / 1e9, main=stats.kv_place[1] / 1e9),
        not stats.kv_pinned and Line.KV_NOT_PINNED(),
        stats.kv_skipped and Line.KV_FEWER_BLOCKS(percent=100 * stats.kv_skipped),
        stats.attentions >= {(False, False), (True, True)} and Line.ATTENTION_LEFT(),
        stats.kernels and Line.KERNELS(names=tuple(sorted(stats.kernels, key=str))),
        *stats.comfyui,
    ]
    return [line for line in lines if isinstance(line, Message)]


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sorting key for names with numbers in them: block 2 before block 10."""
    parts = name.replace(".", " ").split()
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _names(blocks: set[str]) -> str:
    """Return the names of blocks, with consecutive blocks of a stack as a range: double.0-18, single.0."""
    stacks: dict[str, list[int]] = {}
    for name in sorted(blocks, key=natural_order):
        stack, dot, number = name.rpartition(".")
        if number.isdigit():
            stacks.setdefault(stack + dot, []).append(int(number))
        else:
            stacks[name] = []
    return ", ".join(_ranges(numbers, stack) if numbers else stack for stack, numbers in stacks.items())


def _steps(steps: Iterable[int]) -> str:
    """Return steps counted from 1, with consecutive steps as a range."""
    return _ranges([step + 1 for step in sorted(steps)])


def _ranges(numbers: Iterable[int], prefix: str = "") -> str:
    # Group consecutive numbers: a number minus its position in the list is the same for all of them.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{prefix}{run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
