"""Test with syntax trees that imports follow the rules of CONTRIBUTING.md and form no circles."""

import ast
import itertools
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"toma_core", "nodes", "scripts", "demo", "testbed", "benchmarks", "compatibility", "tests"}


@dataclass(frozen=True)
class Room:
    """The allowed imports of the files under a path.

    `outside`: allowed top-level modules besides the standard library. None allows all modules except our own.
    `lazily`: top-level modules that are allowed only inside functions.
    `inside`: our allowed modules, as paths from the root. Imports must be relative, or absolute if `absolute`.
    """

    path: str
    inside: tuple[str, ...]
    outside: frozenset[str] | None
    lazily: frozenset[str] = frozenset()
    absolute: bool = False


# The room of a file is the first one whose path contains the file.
ROOMS = (
    Room("toma_core/config.py", ("toma_core/reasons",), frozenset()),
    Room("toma_core/kernels/triton", ("toma_core",), frozenset({"torch", "triton"})),
    Room("toma_core", ("toma_core",), frozenset({"torch"}), frozenset({"triton"})),
    Room("nodes/adapters", ("nodes/adapters", "toma_core"), None),
    Room("nodes", ("nodes", "toma_core"), None),
    Room("__init__.py", (), frozenset()),
    Room("scripts/comfy_pack.py", ("scripts",), frozenset(), frozenset({"torch", "comfy"}), absolute=True),
    Room("scripts/comfy_server.py", ("scripts",), frozenset(), frozenset({"torch"}), absolute=True),
    Room("scripts/comfy_client.py", ("scripts",), frozenset(), frozenset({"aiohttp"}), absolute=True),
    Room("scripts/archive.py", ("scripts",), frozenset({"filelock"}), absolute=True),
    Room("scripts", ("scripts",), frozenset(), absolute=True),
)


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[int, str, int, bool]]:
    """Yield (level, dotted module, line, inside a function) of every import outside of type-checking blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names] if node.level and not node.module else [node.module or ""]
            yield from ((node.level, name, node.lineno, lazy) for name in names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports(node, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def violations(file: str, source: str) -> list[str]:
    """Return the imports of a file that its room does not allow. file: path from the root, with slashes."""
    room = next(room for room in ROOMS if file == room.path or file.startswith(room.path + "/"))
    found = []
    for level, module, line, lazy in imports(ast.parse(source)):
        top = module.partition(".")[0]
        if level:
            target = "/".join([*file.split("/")[:-level], *module.split(".")])
            fits = any(target == allowed or target.startswith(allowed + "/") for allowed in room.inside)
            if len(file.split("/")) < level or not (fits or (file == "__init__.py" and lazy)):
                found.append(f"{file}:{line}: {room.path} must not reach {target}")
        elif top in OURS:
            if not (room.absolute and top in room.inside):
                found.append(f"{file}:{line}: {top} is ours: import it relatively, if {room.path} may reach it at all")
        elif top not in sys.stdlib_module_names and room.outside is not None:
            allowed = room.outside | (room.lazily if lazy else frozenset())
            if top not in allowed:
                found.append(f"{file}:{line}: {room.path} must not import {top}{'' if lazy else ' at import time'}")
    return found


def reached(file: str, source: str, known: Collection[str]) -> Iterator[str]:
    """Yield the modules of `known` that a file imports relatively, also in functions and for type checking."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = "/".join([*file.split("/")[: -node.level], *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                places = (f"{base}/{alias.name}", base)
                paths = (path for place in places for path in (f"{place}.py", f"{place}/__init__.py"))
                yield from itertools.islice((path for path in paths if path in known), 1)


def circle(sources: Mapping[str, str]) -> list[str]:
    """Return modules that import each other in a circle, the first one also at the end, or [] without a circle."""
    try:
        TopologicalSorter({file: set(reached(file, text, sources)) for file, text in sources.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_contract() -> None:
    below = [path for folder in ("toma_core", "nodes", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [ROOT / "__init__.py", *below]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert [found for file, source in sources.items() for found in violations(file, source)] == []
    shipped = {file: source for file, source in sources.items() if not file.startswith("scripts/")}
    assert circle(shipped) == []


def test_one_copy_of_the_core_per_test_file() -> None:
    """A test file must use either `import toma_core` or the pack's own copy, because the classes of the two do not
    match."""
    both = []
    for path in (ROOT / "tests").rglob("*.py"):
        modules = {module for level, module, _, _ in imports(ast.parse(path.read_text(encoding="utf-8"))) if not level}
        core = {module for module in modules if module.partition(".")[0] == "toma_core"}
        both += [path.name] if core and "scripts.comfy_pack" in modules else []
    assert both == []


FORBIDDEN = {
    "toma_core/merge.py": ["import comfy.model_management", "def f():\n    from comfy import ops", "import triton",
                           "from toma_core import windows", "from ..nodes import simple"],
    "toma_core/kernels/dispatch.py": ["from ...nodes.adapters import unet", "from .... import x"],
    "toma_core/config.py": ["import torch", "from .windows import tile"],
    "nodes/adapters/unet.py": ["from .. import simple"],
    "nodes/simple.py": ["from ..demo import models", "import nodes"],
    "__init__.py": ["from .nodes import simple", "from comfy_api.latest import ComfyExtension"],
    "scripts/run.py": ["import requests", "from toma_core import config"],
}  # fmt: skip


@pytest.mark.parametrize(("file", "source"), [(file, source) for file, all_ in FORBIDDEN.items() for source in all_])
def test_violations_are_found(file: str, source: str) -> None:
    """`test_contract` shows that allowed imports are not reported."""
    assert len(violations(file, source)) == 1


B, C, D = "from .b import y", "from .c import x", "from ..d import y"


@pytest.mark.parametrize(
    ("sources", "length"),
    [
        ({"a/b.py": "from . import c", "a/c.py": f"if TYPE_CHECKING:\n    {B}"}, 2),
        ({"a/b.py": C, "a/c.py": "from .d import x", "a/d.py": B}, 3),
        ({"a/b/__init__.py": C, "a/b/c.py": "from . import y"}, 2),
        ({"a/b/__init__.py": C, "a/b/c.py": D, "a/d.py": f"def f():\n    {B}"}, 3),
        ({"a/b/c.py": "from ...d.e import x", "d/e.py": "from ..a.b.c import y"}, 2),
    ],
)
def test_circles_are_found(sources: dict[str, str], length: int) -> None:
    found = circle(sources)
    assert (len(found), found[:1]) == (length + 1, found[-1:])
