"""What the nodes say on the page, in its languages: the nodes say it, and every language has all of it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.comfyui import ROOT

SAID = ROOT / "web" / "said"
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir())
GAP = re.compile(r"\{(\w+)\}")


def phrases(language: str) -> dict[str, str]:
    """What the nodes say -> in this language."""
    text = (SAID / f"{language}.mjs").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text.removeprefix("export default "))
    return found


def sentences(source: str) -> Iterator[str]:
    """Every text in a Python file, a mark in place of each value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


def nodes_say() -> str:
    files: list[Path] = [*(ROOT / "nodes").rglob("*.py"), *(ROOT / "toma_core").rglob("*.py")]
    texts = [text for path in files for text in sentences(path.read_text(encoding="utf-8"))]
    return "\n".join([*texts, (ROOT / "web" / "toma.js").read_text(encoding="utf-8")])


def test_languages() -> None:
    assert sorted(path.stem for path in SAID.iterdir()) == LANGUAGES
    script = (ROOT / "web" / "toma.js").read_text(encoding="utf-8")
    assert re.findall(r'from "./said/(\w+)\.mjs"', script) == LANGUAGES
    assert f"const LANGUAGES = {{ {', '.join(LANGUAGES)} }}" in script


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_phrase_is_there_with_all_that_changes(language: str) -> None:
    said = phrases(language)
    assert list(said) == list(phrases("en")), "in this order too: the first that fits is taken"
    for phrase, text in said.items():
        assert text.strip(), phrase
        assert sorted(GAP.findall(text)) == sorted(GAP.findall(phrase)), phrase


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_whole_sentences_are_translated(language: str) -> None:
    assert [phrase for phrase, text in phrases(language).items() if text == phrase and phrase.count(" ") > 2] == []


def test_the_nodes_say_every_phrase() -> None:
    """A phrase that the nodes put in another way would never fit again."""
    said = nodes_say()
    for phrase in phrases("en"):
        parts = [part.strip() for part in re.split(r"\{\w+\}|[:,%()]|\.$", phrase)]
        assert [part for part in parts if part not in said] == [], phrase
