"""Find how a ComfyUI differs from the releases with which the pack was tried, and which differences stop merging."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from pathlib import Path

from scripts.api_check.facts import GONE, UNSEEN, Facts
from scripts.api_check.source import Source
from scripts.api_check.uses import StandIn, Use, Uses

FILE = Path(__file__).with_name("known.json")

Known = dict[str, dict[str, str]]  # item of a `Use` -> release -> text


class Kind(Enum):
    """What a difference means."""

    GONE = "Missing"
    UNFIT = "Changed, and the pack's arguments do not fit any more"
    CHANGED = "Changed, and what the pack passes still fits"
    NEW = "New: the pack does not know it"
    UNSEEN = "Not looked at: the folder has only some files"
    UNLISTED = f"Not listed in {FILE.name}: write it again"


@dataclass(frozen=True)
class Difference:
    """A used part of ComfyUI that differs from a tried release."""

    kind: Kind
    use: Use
    before: str  # text of the tried release, empty if known.json lacks the release
    now: str  # text of the ComfyUI

    @property
    def fatal(self) -> bool:
        """Whether the difference stops merging."""
        return self.kind in (Kind.GONE, Kind.UNFIT) and not self.use.optional

    def __str__(self) -> str:
        if self.kind in (Kind.UNSEEN, Kind.UNLISTED):
            return self.use.item
        lines = [
            self.use.item + " (the pack runs without it)" * self.use.optional,
            f"was {self.before}",
            f"is  {self.now}",
        ]
        if self.use.kind == "block" and (names := unknown_arguments(self.use.stand_ins, self.now)):
            lines.append(f"a value in {', '.join(names)} leaves the block unmerged")
        return "\n      ".join(lines)


def read(file: Path = FILE) -> Known:
    """Return the entries of the releases on which the pack was tried."""
    found: Mapping[str, Mapping[str, str]] = json.loads(file.read_text(encoding="utf-8"))
    return {
        item: {r: text for text, releases in texts.items() for r in releases.split()} for item, texts in found.items()
    }


def write(known: Known, file: Path = FILE) -> None:
    """Write the file: one line for each item, with the releases that have each text."""
    lines = []
    for item in sorted(known):
        texts = dict[str, list[str]]()
        for release in sorted(known[item], key=number_of):
            texts.setdefault(known[item][release], []).append(release)
        joined = {text: " ".join(releases) for text, releases in texts.items()}
        # Leave out keys and traits that no release has, because they belong to the pack itself.
        if set(texts) != {GONE} or not item.startswith(("key ", "trait ")):
            lines.append(f"{json.dumps(item)}: {json.dumps(joined)}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def number_of(release: str) -> tuple[int, ...]:
    """Return a sorting key for a release: 0.9.1 comes before 0.10.0."""
    return tuple(int(part) if part.isdigit() else 0 for part in release.split("."))


def newest(known: Known) -> str:
    """Return the newest release that is listed."""
    return max((release for texts in known.values() for release in texts), key=number_of)


def nearest(known: Known, version: str) -> str:
    """Return the release with which a version is compared: this version if it is listed, otherwise the next older
    release. If the version is unknown, return the newest release."""
    older = [r for texts in known.values() for r in texts if number_of(r) <= number_of(version)]
    return max(older, key=number_of, default=newest(known))


def differences(uses: Uses, facts: Facts, known: Known, release: str, folder: Path) -> list[Difference]:
    """Return the differences between the facts of a folder and those of a release, the worst first. If the model of a
    family is missing, nothing else is listed for the family."""
    found, models = list[Difference](), {use.subject for use in uses.values() if use.kind == "derived"}
    missing = {family for family in models if facts[f"derived {family}"] == GONE}
    for item, use in uses.items():
        now, texts = facts[item], known.get(item, {})
        if release not in texts:
            if now not in (GONE, UNSEEN) or use.kind not in ("key", "trait"):
                found.append(Difference(Kind.UNLISTED, use, "", now))
            continue
        if use.kind in ("derived", "path", "block", "loop") and use.subject.partition(" ")[0] in missing:
            continue
        if use.kind == "call" and now == GONE:
            continue  # the name is missing, and the use of kind "name" lists it
        if now != texts[release]:
            kind = _kind(use, texts[release], now, folder)
            if kind is not None:
                found.append(Difference(kind, use, texts[release], now))
    return sorted(found, key=lambda each: list(Kind).index(each.kind))


def _kind(use: Use, before: str, now: str, folder: Path) -> Kind | None:
    """Return what a difference means, or None if it means nothing for the pack."""
    if now == UNSEEN:
        return Kind.UNSEEN
    if now == GONE:
        return Kind.GONE
    if before == GONE:  # the tried release lacks the part
        return Kind.UNFIT if use.kind == "block" and not fits(use, before, now) else None
    if use.kind in ("key", "trait"):
        lost = set(before.split(", ")) - set(now.split(", "))
        return Kind.CHANGED if any(Source(folder).module(name) for name in lost) else None
    if use.kind == "derived":
        return Kind.NEW if set(now.split(", ")) - set(before.split(", ")) - {"none"} else None
    if use.kind == "loop":
        return Kind.CHANGED if set(now.split(", ")) <= use.allowed else Kind.NEW
    return Kind.CHANGED if fits(use, before, now) else Kind.UNFIT


def fits(use: Use, before: str, now: str) -> bool:
    """Return whether the arguments that the pack passes or reads fit `now`, the signature in this ComfyUI. Only
    signatures are compared."""
    if use.kind == "block":
        forms = now.split("; ")
        return all("(" in form and any(stands_in(each, form) for each in use.stand_ins) for form in forms)
    if use.kind == "wrapper":
        return all(_read_fits(use, _names(before.split("; ")[0]), _names(form)) for form in now.split("; "))
    if use.kind != "call":
        return now != "module" and before != "module"
    if "(" not in now or "(" not in before:
        return False
    names, others = _names(now), {name.rstrip("=") for name in _names(now)}
    needed = {name for name in names[use.places :] if not name.startswith("*") and not name.endswith("=")}
    same = [n.rstrip("=") for n in names[: use.places]] == [n.rstrip("=") for n in _names(before)[: use.places]]
    free = any(name.startswith("**") for name in names)
    return same and (free or use.named <= others) and needed <= use.named


def _read_fits(use: Use, before: list[str], now: list[str]) -> bool:
    places = [name for name in now if not name.endswith("=") and not name.startswith("*")]
    if use.places and places[: use.places] != before[: use.places]:
        return False
    return all(places[place : place + 1] == before[place : place + 1] or f"{name}=" in now for place, name in use.read)


def stands_in(stand_in: StandIn, form: str) -> bool:
    """Return whether a hook can stand in for a block, by the rule of `nodes.adapters.compat.check`. form: the block as
    "Name(arguments)"."""
    names = _names(form)
    if any(name.startswith("*") and name.strip("*") and not name.startswith("**") for name in names):
        return True  # the block takes any arguments
    places = [name.rstrip("=") for name in names][: len(stand_in.places)]
    if places != [mine or theirs for mine, theirs in zip_longest(stand_in.places, places)]:
        return False
    left = [name for name in names[len(places) :] if not name.startswith("*")]
    known = {name.rstrip("=") for name in left}
    others = [name for name in left if name.rstrip("=") not in stand_in.required]
    return stand_in.required <= known and all(n.endswith("=") for n in others) and (stand_in.rest or not others)


def _names(form: str) -> list[str]:
    inside = form.partition("(")[2].removesuffix(")")
    return [part for part in inside.split(", ") if part]


def unknown_arguments(stand_ins: Iterable[StandIn], form: str) -> list[str]:
    """Return a block's arguments that no hook knows. If such an argument gets a value, the block runs unmerged."""
    known = frozenset[str]().union(*({*each.places, *each.required, *each.known} for each in stand_ins))
    return [name.strip("=*") for name in _names(form) if name.strip("=*") not in known and not name.startswith("*")]
