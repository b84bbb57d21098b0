"""Test that links and pictures of pages exist, and that settings, presets and nodes on pages match the code."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from itertools import takewhile
from pathlib import Path

from PIL import Image

from benchmarks import readme
from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT

DOCS, HELP = ROOT / "docs", ROOT / "web" / "docs"
RESULTS = ROOT / "benchmarks" / "results"
COUNTS = RESULTS / "counts.md"
BESIDE = [COUNTS, *(RESULTS / "fidelity" / f"{name}.md" for name in ("tables", "trials", "calibrated"))]
CHINESE = ROOT / "README.zh.md"
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.glob("*.md"), *HELP.glob("*.md")} - {CHINESE})
TEXTS = sorted({*PAGES, CHINESE, *BESIDE, *HELP.rglob("*.md")})
FOLDERS = "tests|benchmarks|toma_core|nodes|scripts|demo|compatibility|testbed|web"
MAX_WORDS, MAX_README_LINES = 13_000, 130
# Text between "<!-- name -->" and "<!-- end -->" is written by code.
GENERATED = re.compile(r"<!-- [^>]* -->\n.*?<!-- end[^>]*-->", re.DOTALL)
LINK = re.compile(r'!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\bsrc="([^"]+)"')
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def links(text: str) -> Iterator[str]:
    for markdown, html in LINK.findall(CODE.sub("", text)):
        yield markdown or html


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> Iterator[str]:
    """Yield the links of a page to files and headings that do not exist."""
    for link in links(read(path)):
        target, _, anchor = link.partition("#")
        file = (path.parent / target) if target else path
        there = file.exists() and ROOT in file.resolve().parents
        if not re.match(r"[a-z]+:", link) and not (there and (not anchor or anchor in anchors(read(file)))):
            yield link


def test_links_lead_somewhere() -> None:
    found = {path.relative_to(ROOT).as_posix(): list(broken(path)) for path in TEXTS}
    assert {path: bad for path, bad in found.items() if bad} == {}
    page = "# One\n[a](no.md) ![b](no.png) [c](#one) [d](#two) `[e](no)` <img src='x'> <img src=\"y.png\">\n"
    assert list(links(page)) == ["no.md", "no.png", "#one", "#two", "y.png"]
    assert anchors("## And ComfyUI's own token merging node?\n") == {"and-comfyuis-own-token-merging-node"}


def test_every_page_is_listed_and_every_picture_is_shown_and_opens() -> None:
    listed = set(links(read(DOCS / "README.md")))
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= listed
    shown = {(path.parent / link).resolve() for path in TEXTS for link in links(read(path))}
    for picture in (DOCS / "images").iterdir():
        assert picture.resolve() in shown, f"{picture.name} is on no page"
        with Image.open(picture) as image:
            image.verify()


def test_every_template_is_described_in_the_order_of_need() -> None:
    names = [name.strip("*") for name, _ in table(DOCS / "templates.md", "| template |")]
    assert names == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    for path in (ROOT / "subgraphs").glob("*.json"):
        assert f"*{path.stem}*" in read(DOCS / "templates.md")


def words(text: str) -> int:
    """Count the words of a page outside of text that is written by code."""
    return len(re.findall(r"\S*\w\S*", GENERATED.sub("", text)))


def table(page: Path, head: str) -> list[list[str]]:
    """Return the rows, as lists of cells, of the first table whose header line begins with `head`."""
    lines = read(page).split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith(head)) + 2
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(len, lines[start:])]


def test_pages_are_short() -> None:
    by_hand = {page.relative_to(ROOT).as_posix(): words(read(page)) for page in PAGES}
    assert sum(by_hand.values()) <= MAX_WORDS, by_hand
    assert len(read(ROOT / "README.md").splitlines()) <= MAX_README_LINES
    assert words("a b | - | `c`\n<!-- runs -->\nd e\n<!-- end -->\nf") == 4


def test_nodes_on_pages_exist() -> None:
    nodes = json.loads(read(ROOT / "locales" / "en" / "nodeDefs.json"))
    displayed = {node["display_name"] for node in nodes.values()}
    names = displayed | {name.split(" (")[0] for name in displayed}
    for page in PAGES:
        assert set(re.findall(r"\*\*(ToMA(?: [^*]+)?)\*\*", read(page))) <= names, page.name
    assert [name for name in names if f"**{name}**" not in read(ROOT / "README.md")] == []


def test_presets_on_pages_exist() -> None:
    presets = list(pack_module("toma_core.presets").PRESETS)
    for page in PAGES:
        assert set(re.findall(r"[Pp]reset(?:\*\*)? `(\w+)`", read(page))) <= set(presets), page.name
    assert [row[0].strip("`") for row in table(DOCS / "settings.md", "| preset |")] == presets
    assert re.findall(r"\| \*\*preset\*\* `(\w+)` \|", read(ROOT / "README.md")) == presets


def test_the_table_of_settings_is_the_codes() -> None:
    config, core = pack_module("toma_core.config"), pack_module("toma_core")
    rows = []
    for name in (item.name for item in fields(config.ToMAConfig) if not config.setting_spec(item.name).internal):
        rows.append([pack_module("nodes.adapters.report_text").label(name)])
        for kind in (core.ModelKind.UNET, core.ModelKind.TRANSFORMER):
            shown = [_shown(getattr(core.UserSettings(preset).resolved(kind), name)) for preset in core.PRESETS]
            rows[-1].append(shown[0] if len(set(shown)) == 1 else ", ".join(shown))
    assert [row[:3] for row in table(DOCS / "settings.md", "| setting | UNets |")] == rows


def _shown(value: object) -> str:
    """Format a setting's value as docs/settings.md does."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value) if isinstance(value, Enum) else f"{value:g}"


def test_tables_of_the_readme_are_the_counted_ones() -> None:
    for page in (readme.README, CHINESE):
        text = read(page)
        assert readme.written(text, page) == text, "python -m benchmarks.readme"


def test_the_chinese_readme_is_the_english_one() -> None:
    english, theirs = read(ROOT / "README.md"), read(CHINESE)
    assert "[中文](README.zh.md)" in english
    assert "[English](README.md)" in theirs

    def shape(text: str) -> list[str]:
        kinds = (re.match(r"#+ |\||- |\d\. |!\[", line) for line in text.split("\n"))
        return [kind[0] for kind in kinds if kind]

    def targets(text: str) -> set[str]:
        return {link for link in links(text) if not link.startswith(("#", "README"))}

    assert shape(theirs) == shape(english)
    assert targets(theirs) == targets(english)
    figure = re.compile(r"(?<![\w.])\d+\.\d+|\d+ (?:GB|MB|%)")
    assert set(figure.findall(theirs)) == set(figure.findall(english))
    nodes = json.loads(read(ROOT / "locales" / "zh" / "nodeDefs.json"))
    joined = theirs.replace("\n", " ")
    assert [n["display_name"] for n in nodes.values() if n["display_name"] not in joined] == []


def test_what_code_and_pages_name_exists() -> None:
    for folder in FOLDERS.split("|"):
        for path in (ROOT / folder).rglob("*.py"):
            text = read(path)
            for page in re.findall(r"(?<![\w/])(?:docs|benchmarks/results)/[\w/-]+\.md", text):
                assert (ROOT / page).exists(), f"{path.name} names {page}"
    for page in TEXTS:
        text = read(page)
        for name in re.findall(rf"(?<=[`=\"])((?:{FOLDERS})/[\w/.-]+)(?=[`\" ])", text):
            assert (ROOT / name).exists() or "x.py" in name, f"{page.name} names {name}"
        for file, function in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
            assert f"def {function}(" in read(ROOT / "tests" / file), function
        for file, member in re.findall(r"`([\w/]+\.py):[\w.]*?(\w+)`", text):
            named = rf"^ *(?:(?:class|def) {member}\b|{member}:)"
            assert re.search(named, read(ROOT / file), re.MULTILINE), f"{file}: {member}"


def test_add_a_model_names_what_a_family_has() -> None:
    modules = ("signature", "family", "families.sd3", "families.wan")
    signature, family, example, wan = (pack_module(f"nodes.adapters.{name}") for name in modules)
    homes = signature.BlockSignature, family.ModelHooks, family.BlockGroup, family, example, wan
    known = {name for home in homes for name in dir(home)}
    answers = [row[1] for row in table(DOCS / "add-a-model.md", "| question | answer in |")]
    named = {name for cell in answers for name in re.findall(r"`(\w+)`", cell)}
    assert set() < named <= known, named - known
    code = read(DOCS / "add-a-model.md").split("```python\n")[1].split("```")[0]
    source = Path(str(example.__file__)).read_text(encoding="utf-8")
    shown = [line.strip() for line in code.splitlines() if line.startswith("    ") and "def " not in line]
    assert [line for line in shown if line not in source] == []
