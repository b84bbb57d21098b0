"""Test that texts in every language recommend the same ratios and the same order of nodes."""

import json
import re
from typing import Any

from scripts.comfyui import ROOT
from toma_core.config import ToMAConfig

LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir())


# Careful, usual and highest ratio. In UNets, no ratio above 0.75 was measured. In transformers, merging at a ratio
# above 0.6 has a larger error than an unmerged run of fewer steps with the same work (docs/fidelity.md).
UNET_RATIOS, TRANSFORMER_RATIOS = (0.25, 0.5, 0.75), (0.25, 0.5, 0.6)
USUAL, ALL = 0.5, {*UNET_RATIOS, *TRANSFORMER_RATIOS}
PLACE = "ToMA goes after the LoRAs, before step caches, torch.compile and the sampler."
NOTES = ("- **ratio** is", "- **合并比例**是", "- **合併比例**是")  # beginnings of the line on the ratio in a note


def ratios(text: str) -> set[float]:
    return {float(number) for number in re.findall(r"(?<![\w.])0?\.\d+", text)}


def line_of(path: str, begin: str) -> str:
    """Return the only line of a page that begins with `begin`."""
    (line,) = [line for line in (ROOT / path).read_text(encoding="utf-8").split("\n") if line.startswith(begin)]
    return line


def nodes(language: str) -> Any:
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def test_tooltips_and_pages_recommend_them() -> None:
    assert ToMAConfig().ratio == USUAL
    found = {"README": line_of("README.md", "| **ratio**")}
    for language in LANGUAGES:
        texts = nodes(language)
        for node in ("ToMA", "ToMAAdvanced", "ToMABenchmark"):
            found[f"{language} {node}"] = texts[node]["inputs"]["ratio"]["tooltip"]
        for node in ("ToMA", "ToMAAdvanced"):
            name = texts[node]["inputs"]["ratio"]["name"]
            found[f"{language} {node} help"] = line_of(f"web/docs/{node}/{language}.md", f"| **{name}**")
    assert {where: text for where, text in found.items() if ratios(text) != ALL} == {}
    assert ratios(line_of("docs/settings.md", "1. **ratio** up to")) == {UNET_RATIOS[-1], TRANSFORMER_RATIOS[-1]}
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    table = settings.split("| model | after ratio 0.5 and `balanced` |")[1].split("\n\n")[0].strip()
    for line in table.split("\n")[1:]:
        model, different = line.strip("|").split("|")
        most = (UNET_RATIOS if re.match(r" SD(XL|1\.5)", model) else TRANSFORMER_RATIOS)[-1]
        assert max(ratios(different), default=0) <= most, model


def test_templates_recommend_them() -> None:
    """A template's note has the ratios for its model. Templates that benchmark or calibrate have no ratios in their
    notes."""
    for path in sorted((ROOT / "workflows").glob("*.json")):
        graph = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        is_unet = "SD" in path.stem and "CheckpointLoaderSimple" in {node["type"] for node in graph}
        advice = UNET_RATIOS if is_unet else TRANSFORMER_RATIOS
        measures = "Benchmark" in path.stem or "calibrate" in path.stem
        for node in graph:
            values = node.get("widgets_values", [])
            if node["type"] == "MarkdownNote":
                texts = [values[0], *node["properties"].get("toma_note", {}).values()]
                lines = [line for text in texts for line in text.split("\n") if line.startswith(NOTES)]
                assert [ratios(line) for line in lines] == [set(advice)] * (0 if measures else len(texts)), path.stem
            elif node["type"] == "ToMABenchmark":
                assert values[0] == advice[-1], path.stem
            elif node["type"] in ("ToMA", "ToMAAdvanced"):
                assert USUAL in values, path.stem


def test_one_order_of_nodes() -> None:
    toma = nodes("en")["ToMA"]
    texts = [toma["description"], toma["inputs"]["model"]["tooltip"]]
    texts += [(ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "web/docs/ToMA.md")]
    assert [text for text in texts if PLACE not in " ".join(text.split())] == []
    for language in LANGUAGES:
        toma = nodes(language)["ToMA"]
        place = toma["inputs"]["model"]["tooltip"]
        assert place[place.index("ToMA") :] in toma["description"], language
