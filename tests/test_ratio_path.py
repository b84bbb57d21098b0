"""The path of one setting through the code, as in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re

import torch

from scripts.comfyui import ROOT
from toma_core import Evaluation, RunState, Schedule, Settings

ROW = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`: `([^`]+)`", re.MULTILINE)


def source_of(file: str, function: str) -> str:
    """Return the source of a function, a method or an attribute of a class."""
    text = (ROOT / file).read_text(encoding="utf-8")
    scope: ast.AST = ast.parse(text)
    for name in function.split("."):
        scope = next(
            node
            for node in ast.iter_child_nodes(scope)
            if getattr(node, "name", None) == name or getattr(getattr(node, "target", None), "id", None) == name
        )
    return " ".join((ast.get_source_segment(text, scope) or "").split())


def test_the_ratio_takes_the_hops_that_are_written_down() -> None:
    hops = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert 0 < len(hops) <= 8
    for file, function, expression in hops:
        assert expression in source_of(file, function), (file, function)
    assert hops[0][0].startswith("nodes/")
    assert hops[-1][1] == "weigh"


def test_the_ratio_of_the_settings_is_the_one_of_the_matrix() -> None:
    run = RunState(Schedule(Settings("balanced", {"ratio": 0.75, "min_tokens": 4}).resolved(), (1.0, 0.5)))
    plan = Evaluation(run, run.schedule.decide(1.0)).plan(torch.randn(1, 64, 8), (8, 8), "a")
    assert plan is not None
    assert plan.merge_weights.shape == (1, 1, 16, 64)
