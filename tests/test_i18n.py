"""Texts are data: every id has a text in every language, and behaviour does not depend on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT
from tests.loop import loop

TABLES = ROOT / "web" / "i18n"
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir())
TRANSLATED = [language for language in LANGUAGES if language != "en"]
SCRIPT = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "web").glob("*.js")))
GAP = re.compile(r"\{([\w.:]+)\}")
WORD = re.compile(r"[a-z]{4,}")


def table(language: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))
    return found


def kinds(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.fixture
def ids(pack: ModuleType) -> list[str]:
    """Return every id of the pack's enums."""
    for name in ("benchmark", "calibrate", "node_status", "toma", "report", "adapters.registry"):
        pack_module(f"nodes.{name}")
    found = kinds(pack_module("toma_core.reasons").MessageId)
    return [member.value for kind in found for member in kind]  # type: ignore[attr-defined]


def test_languages() -> None:
    assert sorted(path.stem for path in TABLES.iterdir()) == LANGUAGES
    assert json.loads(re.search(r"const LANGUAGES = (\[.*\])", SCRIPT)[1]) == LANGUAGES  # type: ignore[index]


def test_every_id_has_a_text_and_every_text_an_id(ids: list[str]) -> None:
    assert len(ids) == len(set(ids)), "an id has one meaning"
    page = set(re.findall(r'\bid: "(\w+)"', SCRIPT))
    assert set(ids) | page == set(table("en")["messages"])


@loop("language", TRANSLATED)
def test_no_text_is_missing(language: str) -> None:
    english, theirs = table("en")["messages"], table(language)["messages"]
    assert (sorted(english.keys() - theirs.keys()), sorted(theirs.keys() - english.keys())) == ([], [])
    for name, text in theirs.items():
        gaps, wanted = (sorted(g for g in GAP.findall(t) if not g.startswith("label.")) for t in (text, english[name]))
        assert gaps == wanted, name
        assert text.strip(), name
    same = [name for name, text in theirs.items() if text == english[name] and len(WORD.findall(GAP.sub("", text))) > 2]
    assert same == [], "not translated"


@loop("language", LANGUAGES)
def test_labels_are_those_of_the_widgets(language: str) -> None:
    nodes = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    labels = table(language)["labels"]
    shown: dict[str, str] = {}
    for node in nodes.values():
        for name, texts in node["inputs"].items():
            shown.setdefault(name, texts["name"])
    plain = {name: name.replace("_", " ") for name in shown}
    assert {**plain, **labels} == shown
