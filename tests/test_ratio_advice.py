"""Tooltips, the README, help pages, templates and pages recommend the ratios of `toma_core.config`, and one order of
nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from scripts.comfyui import ROOT
from tests.loop import loop
from toma_core.config import TRANSFORMER_RATIOS, UNET_RATIOS, RatioAdvice, ToMAConfig

LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir())
TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
ALL = {0.25, 0.5, 0.6, 0.75}
PLACE = "ToMA goes after the LoRAs, before step caches, torch.compile and the sampler."
NOTES = ("- **ratio** is", "- **合并比例**是", "- **合併比例**是")  # a line of a note
NUMBER = re.compile(r"(?<![\w.])0?\.\d+")


def ratios(text: str) -> set[float]:
    """Return the numbers below 1 of a text."""
    return {float(number) for number in NUMBER.findall(text)}


def nodes(language: str) -> Any:
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def advice(template: Path) -> RatioAdvice:
    """Return the advice for the model that a template loads."""
    loads = [node["type"] for node in json.loads(template.read_text(encoding="utf-8"))["nodes"]]
    return UNET_RATIOS if "CheckpointLoaderSimple" in loads and "SD" in template.stem else TRANSFORMER_RATIOS


def loads_only_a_measurement(template: Path) -> bool:
    """Return whether a template has no ratio to set by hand: the node measures which ratios pay."""
    return "Benchmark" in template.stem or "calibrate" in template.stem


def test_the_default_is_the_usual_ratio() -> None:
    assert {*UNET_RATIOS, *TRANSFORMER_RATIOS} == ALL
    assert ToMAConfig().ratio == UNET_RATIOS.usual == TRANSFORMER_RATIOS.usual


@loop("language", LANGUAGES)
def test_tooltips_and_help_recommend_them(language: str) -> None:
    texts = nodes(language)
    for node in ("ToMA", "ToMAAdvanced", "ToMABenchmark"):
        assert ratios(texts[node]["inputs"]["ratio"]["tooltip"]) == ALL, node
    for node in ("ToMA", "ToMAAdvanced"):
        name = texts[node]["inputs"]["ratio"]["name"]
        page = (ROOT / "web" / "docs" / node / f"{language}.md").read_text(encoding="utf-8")
        (row,) = [line for line in page.split("\n") if line.startswith(f"| **{name}**")]
        assert ratios(row) == ALL, node


@loop("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_recommend_them(path: Path) -> None:
    of_model = advice(path)
    for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
        values = node.get("widgets_values", [])
        if node["type"] == "MarkdownNote":
            texts = [values[0], *node["properties"].get("toma_note", {}).values()]
            lines = [line for text in texts for line in text.split("\n") if line.startswith(NOTES)]
            expected = 0 if loads_only_a_measurement(path) else len(texts)
            assert [ratios(line) for line in lines] == [set(of_model)] * expected
        elif node["type"] == "ToMABenchmark":
            assert values[0] == of_model.most
        elif node["type"] in ("ToMA", "ToMAAdvanced"):
            assert of_model.usual in values


def test_pages_recommend_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.split("\n") if line.startswith("| **ratio**")]
    assert ratios(row) == ALL
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (faster,) = [line for line in settings.split("\n") if line.startswith("1. **ratio** up to")]
    assert ratios(faster) == {UNET_RATIOS.most, TRANSFORMER_RATIOS.most}
    table = settings.split("| model | begin with | note |")[1].split("\n\n")[0].strip().split("\n")[1:]
    for line in table:
        model, begin, _ = [cell.strip() for cell in line.strip("|").split("|")]
        most = (UNET_RATIOS if re.match(r"SD(XL|1\.5)", model) else TRANSFORMER_RATIOS).most
        assert max(ratios(begin)) <= most, model


def test_one_order_of_nodes() -> None:
    toma = nodes("en")["ToMA"]
    texts = [toma["description"], toma["inputs"]["model"]["tooltip"]]
    files = (ROOT / "README.md", ROOT / "web" / "docs" / "ToMA.md")
    texts += [path.read_text(encoding="utf-8") for path in files]
    assert [text for text in texts if PLACE not in " ".join(text.split())] == []
    for language in LANGUAGES:
        texts_of = nodes(language)["ToMA"]
        place = texts_of["inputs"]["model"]["tooltip"]
        sentence = place[place.index("ToMA") :]
        assert sentence in texts_of["description"], language
