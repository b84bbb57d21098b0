"""Write the tables of README.md and README.zh.md from counts and the memory table: `python -m benchmarks.readme`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from scripts.comfyui import ROOT

README, CHINESE, SETTINGS = ROOT / "README.md", ROOT / "README.zh.md", ROOT / "docs" / "settings.md"
COUNTS = ROOT / "benchmarks" / "results" / "counts.md"
_COLUMNS = {"4": 4, "8": 5, "20": 6, "50": 7}  # steps -> column of the table of runs
# English words of the tables -> Chinese words. Replacement follows this order, so longer words come first.
_IN_CHINESE = {
    "less work (counted)": "计算量减少 (计数)",
    "two models of 2 steps": "两个模型各 2 步",
    "with its turbo LoRA": "加 turbo LoRA",
    "extra memory": "额外内存",
    "less work": "计算量减少",
    "less gain": "收益较小",
    "partly": "部分",
    "RAM": "内存",
    "model": "模型",
    "steps": "步数",
    ", then ": ", 然后 ",
    "none": "无",
    "yes": "可以",
}
_CARDS = ("8 GB", "12 GB", "16 GB", "24 GB")


@dataclass(frozen=True)
class Gain:
    """A row of README's table of gains, and where to find its numbers."""

    title: str
    steps: str
    run: tuple[str, str] | str  # (model, size) in the table of runs, or the name of a run of a template
    cache: str = ""  # row in the table of KV caches, "" if the model has no cache
    four_bits: bool = False  # whether the cache is counted in four bits, as it is stored for videos
    memory: str = ""  # start of the row in the table of cards, "" without such a row


GAINS = (
    Gain("Z-Image Turbo, 1024 x 1024", "8", ("Z-Image", "1024"), "Z-Image, 1024 x 1024", memory="Z-Image, bf16, 1024"),
    Gain("Qwen-Image 2.1 Turbo, 1024 x 1024", "8", ("Qwen-Image 2.1", "1024"), "Qwen-Image 2.1, 1024 x 1024",
         memory="Qwen-Image 2.1, int8, 1024"),
    Gain("Wan 14B, 832 x 480 x 81, two models of 2 steps", "4", ("Wan 14B", "832 x 480 x 81"),
         "Wan 14B, 832 x 480 x 81", True, "Wan 14B, fp8, 832"),
    Gain("LTX-2.3, 640 x 352 x 121, then 1280 x 704 x 121", "8 + 3", "LTX-2.3, both",
         "LTX-2.3, 1280 x 704 x 121", True, "LTX-2.3, fp8, 1280"),
    Gain("MiniMax H3 with its turbo LoRA, 1344 x 768 x 73", "8", "H3, 8 steps at 1344 x 768 x 73",
         "MiniMax H3, 1344 x 768 x 73", True, "MiniMax H3, int8, 1344"),
    Gain("Flux.1 dev, 1024 x 1024", "20", ("Flux.1", "1024"), "Flux.1, 1024 x 1024", memory="Flux.1, fp8, 1024"),
    Gain("SDXL Lightning, Turbo, LCM, 1024 x 1024", "4", ("SDXL", "1024")),
    Gain("SDXL, 1024 x 1024", "20", ("SDXL", "1024")),
)  # fmt: skip


def rows_of(page: Path, head: str) -> list[list[str]]:
    """Find a page's first table with a head that begins with `head`. Return the cells below the head."""
    lines = page.read_text(encoding="utf-8").split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith(head)) + 2
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(len, lines[start:])]


def saved(gain: Gain) -> str:
    """Return how much less work `balanced` needs at ratio 0.5 than an unmerged run."""
    if isinstance(gain.run, str):
        return next(row[3] for row in rows_of(COUNTS, "| run | merged steps |") if row[0] == gain.run)
    rows = rows_of(COUNTS, "| model | side, px | setting |")
    cell = next(r[_COLUMNS[gain.steps]] for r in rows if (r[0], r[1]) == gain.run and r[2] == "balanced")
    return cell.split(" (")[0]


def gains() -> list[str]:
    """Return the lines of the table of gains."""
    caches = {row[0]: row[1:] for row in rows_of(SETTINGS, "| | bf16 | four bits |")}
    lines = ["| model | steps | less work (counted) | extra memory |", "|---|---|---|---|"]
    for gain in GAINS:
        memory = f"{caches[gain.cache][gain.four_bits]} GB" if gain.cache else "none"
        lines.append(f"| {gain.title} | {gain.steps} | {saved(gain)} | {memory} |")
    return lines


def cards() -> list[str]:
    """Return the lines of the table of what to expect on each card."""
    fits = {row[0]: row[1:] for row in rows_of(SETTINGS, "|  | 8 GB | 12 GB")}
    lines = [f"| model | less work | {' | '.join(_CARDS)} |", "|---|---|" + "---|" * len(_CARDS)]
    for gain in GAINS:
        if not gain.memory:
            continue
        (name,) = [row for row in fits if row.startswith(gain.memory)]
        lines.append(f"| {name} | {saved(gain)} | {' | '.join(map(_advice, fits[name][: len(_CARDS)]))} |")
    (sdxl,) = {saved(gain) for gain in GAINS if not gain.memory}
    return [*lines, f"| SDXL, SD1.5 | {sdxl} | " + " | ".join(["yes"] * len(_CARDS)) + " |"]


def _advice(cell: str) -> str:
    """Return what a cell of the memory table, such as "4-bit 0.8 + 0.6, of 70 %", means for the user."""
    if cell.startswith("none"):
        return "less gain"
    in_main = cell.split(",")[0].split("+ ")[1]
    fits = "partly" if ", of" in cell else "yes"
    return fits if in_main == "0.0" else f"{fits}, RAM {in_main} GB"


def chinese(line: str) -> str:
    """Return a line of a table in Chinese."""
    for words, theirs in _IN_CHINESE.items():
        line = line.replace(words, theirs)
    return line.replace(", ", "\N{FULLWIDTH COMMA}")


def written(text: str, page: Path = README) -> str:
    """Return the text of a page with its tables renewed."""
    for name, lines in (("gains", gains()), ("cards", cards())):
        shown = [chinese(line) for line in lines] if page == CHINESE else lines
        body = "\n".join([f"<!-- {name} -->", "", *shown, "", "<!-- end -->"])
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, body=body: body, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main() -> None:
    """Parse the command line and write both pages."""
    argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__).parse_args()
    for page in (README, CHINESE):
        page.write_text(written(page.read_text(encoding="utf-8"), page), encoding="utf-8")


if __name__ == "__main__":
    main()
