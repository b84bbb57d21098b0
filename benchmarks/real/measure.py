"""Metrics of every picture, cached by content, and their summary for each setting."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import BenchmarkError
from .metrics import FID, METRICS, LeftOutError, Metric, Picture, failed, load
from .pictures import UNMERGED, Folder, Job, say

# The unmerged picture of another seed: the scale of differences between unrelated pictures of one prompt.
OTHER_SEED = "another seed"
SAVE_EVERY = 20


@dataclass
class Pair:
    """A picture, its unmerged counterpart, and their scores by the name of the metric."""

    setting: str
    prompt: str
    seed: int
    picture: Picture
    twin: Picture
    seconds: float | None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return self.picture.digest == self.twin.digest


@dataclass
class Summary:
    """One setting: metrics as {"mean", "deviation", "worst"}, and median seconds of comparable runs."""

    setting: str
    pictures: int
    identical: int
    seconds: float | None
    timed: int
    speedup: float | None
    figures: dict[str, dict[str, float]]
    fid: float | None = None


@dataclass
class Results:
    """Everything that is reported. `notes`: what has to be said besides, and one sentence for each metric that could
    not be had."""

    pairs: list[Pair]
    summaries: list[Summary]
    notes: list[str]


def pairs_of(folder: Folder, jobs: Sequence[Job]) -> list[Pair]:
    """Pair every picture with its unmerged counterpart, and every unmerged one with that of the next seed."""
    twins = {(job.prompt, job.seed): Picture(folder.picture(job)) for job in jobs if job.setting is None}
    found = []
    for job in jobs:
        record = folder.record(job) or {}
        seconds = record.get("seconds") if record.get("timed") else None
        picture = Picture(folder.picture(job))
        found.append(Pair(job.name, job.prompt, job.seed, picture, twins[job.prompt, job.seed], seconds))
    by_prompt: dict[str, list[tuple[int, Picture]]] = defaultdict(list)
    for (prompt, seed), picture in twins.items():
        by_prompt[prompt].append((seed, picture))
    for prompt, group in by_prompt.items():
        for (_, twin), (seed, picture) in itertools.pairwise(group):
            found.append(Pair(OTHER_SEED, prompt, seed, picture, twin, None))
    return found


def measure(folder: Folder, pairs: Sequence[Pair], device: str, metrics: Sequence[Metric] = METRICS) -> list[str]:
    """Compute the metrics of all pairs and return messages about skipped ones."""
    cache = _Cache(folder)
    skipped_by_settings = []
    for metric in metrics:
        wanted = [pair for pair in pairs if _has(metric, pair)]
        keys = {id(pair): _key(metric, pair) for pair in wanted}
        missing = [pair for pair in wanted if keys[id(pair)] not in cache.values]
        try:
            score: Any = load(metric, device) if missing else None
            for number, pair in enumerate(missing, 1):
                cache.values[keys[id(pair)]] = score(pair.picture, pair.twin, pair.prompt)
                if number % SAVE_EVERY == 0:
                    cache.save()
                    say(f"{metric.title}: {number}/{len(missing)}")
        except LeftOutError as error:
            skipped_by_settings.append(str(error))
            continue
        except BenchmarkError:
            raise
        except Exception as error:
            skipped_by_settings.append(failed(metric, error))
            continue
        finally:
            cache.save()
        for pair in wanted:
            pair.figures[metric.name] = cache.values[keys[id(pair)]]
    return skipped_by_settings


def summarise(pairs: Sequence[Pair], metrics: Sequence[Metric] = METRICS) -> list[Summary]:
    """Return one summary for each setting, the unmerged run first and the other seed last."""
    groups: dict[str, list[Pair]] = {UNMERGED: []}
    for pair in sorted(pairs, key=lambda p: p.setting == OTHER_SEED):
        groups.setdefault(pair.setting, []).append(pair)
    found = []
    plain: float | None = None
    for setting, group in groups.items():
        times = [pair.seconds for pair in group if pair.seconds is not None]
        seconds = statistics.median(times) if times else None
        if setting == UNMERGED:
            plain = seconds
        speedup = plain / seconds if plain and seconds and setting != UNMERGED else None
        figures = {m.name: _spread(m, group) for m in metrics if any(m.name in pair.figures for pair in group)}
        identical = 0 if setting == UNMERGED else sum(pair.identical for pair in group)
        found.append(Summary(setting, len(group), identical, seconds, len(times), speedup, figures))
    return found


def add_fid(summaries: Sequence[Summary], pairs: Sequence[Pair], device: str) -> list[str]:
    """Compute the Frechet distances and return messages about skipped ones."""
    merged = [summary for summary in summaries if summary.setting not in (UNMERGED, OTHER_SEED)]
    try:
        distance: Callable[..., float] = load(FID, device)
        for summary in merged:
            say(f"{FID.title}: {summary.setting}")
            group = [pair for pair in pairs if pair.setting == summary.setting]
            value = distance([pair.picture for pair in group], [pair.twin for pair in group])
            if not math.isfinite(value):
                raise ValueError(f"it came out as {value}; more pictures may help")
            summary.fid = value
    except LeftOutError as error:
        return [str(error)]
    except Exception as error:
        return [failed(FID, error)]
    return []


def results(folder: Folder, jobs: Sequence[Job], device: str) -> Results:
    """Compute all metrics that are available here."""
    pairs = pairs_of(folder, jobs)
    skipped_by_settings = measure(folder, pairs, device)
    summaries = summarise(pairs)
    skipped_by_settings += add_fid(summaries, pairs, device)
    return Results(pairs, summaries, skipped_by_settings)


class _Cache:
    """Scores in figures.json; an unreadable file is replaced."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file: Path = folder.path / "figures.json"
        self.values: dict[str, float] = {}
        try:
            found: Any = json.loads(self._file.read_text(encoding="utf-8"))
            self.values = found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            pass

    def save(self) -> None:
        self._folder.write(self._file, json.dumps(self.values, indent=0, sort_keys=True).encode())


def _has(metric: Metric, pair: Pair) -> bool:
    if pair.setting == UNMERGED:
        return metric.alone
    return not (pair.setting == OTHER_SEED and metric.alone)


def _key(metric: Metric, pair: Pair) -> str:
    about = pair.prompt if metric.alone else pair.twin.digest
    return f"{metric.name} {metric.identity}: {pair.picture.digest} {about}"


def _spread(metric: Metric, group: Sequence[Pair]) -> dict[str, float]:
    values = [pair.figures[metric.name] for pair in group]
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "worst": (min if metric.higher_is_closer else max)(values),
    }
