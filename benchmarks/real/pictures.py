"""List the wanted pictures, and make those that the output folder lacks."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import BenchmarkError
from .graphs import Graph, Setting, Template, key_of
from .server import Server

UNMERGED = "unmerged"


@dataclass(frozen=True)
class Job:
    """One picture: its prompt, seed and setting (None: unmerged), and its graph."""

    prompt: str
    seed: int
    setting: Setting | None
    graph: Graph

    @property
    def key(self) -> str:
        """Return the name of the picture's files, without suffix."""
        return key_of(self.graph)

    @property
    def name(self) -> str:
        return UNMERGED if self.setting is None else self.setting.name


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line. Empty lines, lines that begin with # and repetitions are skipped."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"--prompts {path} cannot be read: {error}") from None
    prompts = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not prompts:
        raise BenchmarkError(f"{path} holds no prompt; it should have one a line")
    return prompts


def plan(
    template: Template, prompts: Sequence[str], negative: str, seeds: Sequence[int], settings: Sequence[Setting]
) -> list[Job]:
    """Return every picture in the order in which they are made: all settings for each prompt and seed, each time
    beginning with another setting. So a machine that gets warmer or busier favours no setting."""
    jobs = []
    ways: list[Setting | None] = [None, *settings]
    for turn, (prompt, seed) in enumerate((prompt, seed) for prompt in prompts for seed in seeds):
        first = turn % len(ways)
        for setting in ways[first:] + ways[:first]:
            jobs.append(Job(prompt, seed, setting, template.fill(prompt, negative, seed, setting)))
    return jobs


class Folder:
    """Pictures as KEY.png with KEY.json beside them. The JSON is written last, so a picture with a JSON is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pictures = path / "pictures"

    def prepare(self, conditions: dict[str, str]) -> None:
        """Make the folder. Raises BenchmarkError for a folder that was made under other conditions, because its times
        and pictures are not comparable."""
        try:
            self.pictures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchmarkError(f"--out {self.path} cannot be made: {error}") from None
        file = self.path / "conditions.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else conditions
        if before != conditions:
            raise BenchmarkError(
                f"the pictures in {self.path} were made with {before}; this server has {conditions}. Give another "
                "folder with --out"
            )
        self.write(file, json.dumps(conditions, indent=1).encode())

    def picture(self, job: Job) -> Path:
        return self.pictures / f"{job.key}.png"

    def record(self, job: Job) -> dict[str, Any] | None:
        """Return the record of a picture, None if the picture has to be made."""
        try:
            found: dict[str, Any] = json.loads(self.picture(job).with_suffix(".json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if self.picture(job).is_file() else None

    def save(self, job: Job, png: bytes, seconds: float | None, timed: bool) -> None:
        """Store a picture. timed: whether the seconds are comparable with those of other runs."""
        about = {"prompt": job.prompt, "seed": job.seed, "setting": job.name, "seconds": seconds, "timed": timed}
        self.write(self.picture(job), png)
        record = json.dumps({**about, "graph": job.graph}, indent=1)
        self.write(self.picture(job).with_suffix(".json"), record.encode())

    def write(self, file: Path, data: bytes) -> None:
        """Write a file atomically. Raises BenchmarkError, for example if the disk is full."""
        partial = file.with_name(file.name + ".part")
        try:
            partial.write_bytes(data)
            os.replace(partial, file)
        except OSError as error:
            raise BenchmarkError(
                f"{file} cannot be written ({error.strerror}). Make room, then run the same command again: what is "
                "complete is kept"
            ) from None


def make_missing(server: Server, template: Template, folder: Folder, jobs: Sequence[Job]) -> None:
    """Queue missing pictures one after the other."""
    missing = [job for job in jobs if folder.record(job) is None]
    say(f"{len(jobs)} pictures wanted, {len(jobs) - len(missing)} are there, {len(missing)} to make")
    warm: set[str] = set()
    spent: list[float] = []
    for number, job in enumerate(missing, 1):
        start = time.monotonic()
        made = server.make(job.graph, template.picture)
        spent.append(time.monotonic() - start)
        # The first run of a setting is not timed, because it includes one-time work (compiling, checks of kernels).
        timed = job.name in warm and made.seconds is not None and template.is_pure(job.graph, made.cached)
        warm.add(job.name)
        folder.save(job, made.png, made.seconds, timed)
        left = statistics.median(spent) * (len(missing) - number)
        say(f"{number}/{len(missing)}  {job.name}, seed {job.seed}, {job.prompt[:40]!r}; {left:.0f} s left")


def say(text: str) -> None:
    """Print one line to stderr, unbuffered. stdout holds only the results."""
    print(text, file=sys.stderr, flush=True)
