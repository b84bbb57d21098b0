"""Test that texts have none of the words in MISTAKES, and that no shipped file is too long."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 350
# Words that are mistakes in docstrings, comments and pages: words for persons where no person acts, and calques.
MISTAKES = re.compile(r"\b(so many|so-manieth|nobody|somebody|whoever|anew|left whole)\b", re.IGNORECASE)
SHIPPED = ["toma_core", "nodes"]
OTHERS = ["web", "demo", "testbed", "benchmarks", "compatibility", "scripts", "tests", "docs", ".github"]


def complaints(path: Path) -> list[str]:
    """Return the words of MISTAKES in a file, and "lines" if the file has too many lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return MISTAKES.findall(text)
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, defined)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    prose += [token.string for token in tokens if token.type == tokenize.COMMENT]
    shipped = path.relative_to(ROOT).parts[0] in SHIPPED
    found = MISTAKES.findall("\n".join(prose)) + ["lines"] * (shipped and text.count("\n") > MAX_LINES)
    return found


def test_words_are_those_of_the_field() -> None:
    patterns = ("*.py", "*.js", "*.sh", "*.md", "*.yml")
    below = [file for folder in SHIPPED + OTHERS for pattern in patterns for file in (ROOT / folder).rglob(pattern)]
    files = {*below, *(file for pattern in patterns for file in ROOT.glob(pattern))} - {Path(__file__)}
    found = {path.relative_to(ROOT).as_posix(): complaints(path) for path in sorted(files)}
    assert {path: words for path, words in found.items() if words} == {}
