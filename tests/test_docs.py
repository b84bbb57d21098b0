"""Every relative link, linked heading and picture in the texts is there, and the index of docs/ lists every page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from scripts.comfyui import ROOT
from tests.loop import loop

DOCS = ROOT / "docs"
TEXTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "web" / "docs").rglob("*.md")])
LINK = re.compile(r'!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\bsrc="([^"]+)"')
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    for markdown, html in LINK.findall(CODE.sub("", text)):
        yield markdown or html


def anchors(text: str) -> set[str]:
    """The ids that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target) if target else path
        there = file.exists() and ROOT in file.resolve().parents
        if not there or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@loop("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](no.md) ![b](no.png) [c](#one) [d](#two) `[e](no)` <img src='x'> <img src=\"y.png\">\n")
    assert [link for link in links(page.read_text()) if link.startswith(("no", "y"))] == ["no.md", "no.png", "y.png"]
    assert anchors("## And ComfyUI's own token merging node?\n") == {"and-comfyuis-own-token-merging-node"}


def test_index_lists_every_page() -> None:
    listed = set(links((DOCS / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= listed


def test_tests_that_are_named_exist() -> None:
    named = {name for path in TEXTS for name in re.findall(r"`([\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8"))}
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_every_picture_is_shown_and_opens() -> None:
    shown = {(path.parent / link).resolve() for path in TEXTS for link in links(path.read_text(encoding="utf-8"))}
    for picture in (DOCS / "images").iterdir():
        assert picture.resolve() in shown, f"{picture.name} is on no page"
        with Image.open(picture) as image:
            image.verify()


def test_readme_names_every_template() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "workflows").glob("*.json"):
        assert f"**{path.stem}**" in text
    for path in (ROOT / "subgraphs").glob("*.json"):
        assert f"*{path.stem}*" in text
