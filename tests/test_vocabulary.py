"""The words of the code: no identifier that the field's terms replaced, and no file too long to read at once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.loop import loop

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("toma_core", "nodes") for path in (ROOT / folder).rglob("*.py"))
MAX_LINES = 350

# Words that are mistakes in docstrings, comments and pages: persons that do not exist, and calques.
MISTAKES = re.compile(r"\b(so many|so-manieth|nobody|somebody|whoever|anew|left whole)\b", re.IGNORECASE)
FOLDERS = [
    "toma_core",
    "nodes",
    "web",
    "demo",
    "benchmarks",
    "compatibility",
    "scripts",
    "testbed",
    "tests",
    "docs",
    ".github",
]
WRITTEN = sorted(
    path
    for pattern in ("*.py", "*.js", "*.sh", "*.md", "*.yml")
    for path in (*ROOT.glob(pattern), *(file for folder in FOLDERS for file in (ROOT / folder).rglob(pattern)))
    if path != Path(__file__)
)

# Old name -> the name to use.
REPLACED = {
    "so_many": "resolve_count",
    "moved_on": "propagate",
    "move_on": "update",
    "given_up": "disabled",
    "give_up": "disable",
    "chosen_blindly": "random_because",
    "unplanned": "oom_scopes",
    "unserved": "attention_hook_missed",
    "otherwise": "fallback_config",
    "settle": "resolve_mode",
    "take_back": "discard_evaluations",
    "goes_on": "continues_run",
    "dealt": "budget_of",
    "most_slots": "max_slots",
    "picks": "dest_slots",
    "FieldSpec": "SettingSpec",
    "Details": "Cache",
    "Detail": "Cached",
    "Bands": "RatioSchedule",
    "Decision": "StepPlan",
    "Piece": "TileBatch",
    "keep_detail": "refreshes_cache",
    "keeps_detail": "refreshes_cache",
    "detail_reuse": "residual cache, implied by full_step_interval",
    "whole_every": "full_step_interval",
    "whole_first": "skip_first_blocks",
    "whole_last": "skip_last_blocks",
    "select_every": "selection_interval",
    "weigh_every": "weight_interval",
    "plan_from": "similarity_from",
    "all_keys": "kv_cache",
    "MOST": "MAX_ and what is limited",
}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines, reads or passes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg


@loop("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_those_of_the_field(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = {name: REPLACED[name] for name in identifiers(ast.parse(text)) if name in REPLACED}
    assert not found, "old names, and those to use"
    assert len(text.splitlines()) <= MAX_LINES


def prose(path: Path) -> str:
    """Return the docstrings and comments of a Python file, or the text of any other file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, defined)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


@loop("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_names_its_actors(path: Path) -> None:
    assert MISTAKES.findall(prose(path)) == [], "see the words in MISTAKES"
