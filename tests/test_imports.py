"""The import contract, read from the syntax trees: toma_core <- nodes/adapters <- nodes <- root __init__.py.

Inside the pack every import of its own code is relative, because ComfyUI names the pack by its path; toma_core never
imports ComfyUI; shipped code imports none of scripts, demo, benchmarks, compatibility, testbed and tests; testbed
imports neither benchmarks nor tests; no modules import each other in a circle.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.loop import loop

ROOT = Path(__file__).parent.parent
OURS = {"toma_core", "nodes", "scripts", "demo", "benchmarks", "compatibility", "testbed", "tests"}
STDLIB = set(sys.stdlib_module_names)


@dataclass(frozen=True)
class Room:
    """The allowed imports of the files under a path.

    `outside`: top-level modules besides the standard library, None for any that is not ours.
    `lazily`: further ones, only inside functions.
    `inside`: our own rooms, as paths from the root; reached by relative imports, or by absolute ones if `absolute`.
    """

    path: str
    inside: tuple[str, ...]
    outside: frozenset[str] | None
    lazily: frozenset[str] = frozenset()
    absolute: bool = False


# The first room whose path fits a file is its room.
ROOMS = (
    Room("toma_core/settings.py", ("toma_core/reasons",), frozenset()),
    Room("toma_core/config.py", ("toma_core/settings", "toma_core/reasons"), frozenset()),
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
    Room("testbed", ("testbed", "scripts"), None, absolute=True),
)


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[int, str, int, bool]]:
    """Yield (level, dotted module, line, inside a function) of every import outside of type-checking blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and not node.module:
                yield from ((node.level, alias.name, node.lineno, lazy) for alias in node.names)
            else:
                yield node.level, node.module or "", node.lineno, lazy
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            yield from imports(node, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def room_of(file: str) -> Room:
    return next(room for room in ROOMS if file == room.path or file.startswith(room.path + "/"))


def violations(file: str, source: str) -> list[str]:
    """Return the imports of a file (path from the root, with slashes) that violate the contract of its room."""
    room = room_of(file)
    found = []
    for level, module, line, lazy in imports(ast.parse(source)):
        top = module.partition(".")[0]
        if level:
            folder = file.split("/")[:-level]
            if len(file.split("/")) < level:
                found.append(f"{file}:{line}: relative import leaves the pack")
                continue
            target = "/".join([*folder, *module.split(".")])
            fits = any(target == allowed or target.startswith(allowed + "/") for allowed in room.inside)
            if not fits and not (file == "__init__.py" and lazy):
                found.append(f"{file}:{line}: {room.path} must not reach {target}")
        elif top in OURS:
            if not (room.absolute and top in room.inside):
                found.append(f"{file}:{line}: {top} is ours: import it relatively, if {room.path} may reach it at all")
        elif top not in STDLIB and room.outside is not None:
            allowed = room.outside | (room.lazily if lazy else frozenset())
            if top not in allowed:
                found.append(f"{file}:{line}: {room.path} must not import {top}{'' if lazy else ' at import time'}")
    return found


def files() -> list[str]:
    folders = ("toma_core", "nodes", "scripts", "testbed")
    found = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return ["__init__.py", *sorted(found)]


@loop("file", files())
def test_contract(file: str) -> None:
    assert violations(file, (ROOT / file).read_text(encoding="utf-8")) == []


@loop(
    ("file", "source"),
    [
        ("toma_core/merge.py", "import comfy.model_management"),
        ("toma_core/merge.py", "def f():\n    from comfy import ops"),
        ("toma_core/merge.py", "import numpy"),
        ("toma_core/merge.py", "import triton"),
        ("toma_core/merge.py", "from toma_core import windows"),
        ("toma_core/merge.py", "from ..nodes import simple"),
        ("toma_core/kernels/dispatch.py", "from ...nodes.adapters import unet"),
        ("toma_core/kernels/dispatch.py", "from .... import x"),
        ("toma_core/config.py", "import torch"),
        ("toma_core/config.py", "from .windows import tile"),
        ("nodes/adapters/unet.py", "from ..simple import ToMA"),
        ("nodes/adapters/unet.py", "from .. import simple"),
        ("nodes/simple.py", "from ..demo import models"),
        ("nodes/simple.py", "import nodes"),
        ("nodes/simple.py", "from scripts.comfyui import ROOT"),
        ("__init__.py", "from .nodes import simple"),
        ("__init__.py", "from comfy_api.latest import ComfyExtension"),
        ("scripts/run.py", "import requests"),
        ("scripts/run.py", "from toma_core import config"),
        ("testbed/models/images.py", "from benchmarks import cost"),
        ("testbed/fullsize.py", "def f():\n    from tests import loop"),
    ],
)
def test_contract_catches(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@loop(
    ("file", "source"),
    [
        ("toma_core/merge.py", "import math, torch\nfrom .windows import tile\nfrom . import plan"),
        ("toma_core/kernels/dispatch.py", "def f():\n    import triton"),
        ("toma_core/kernels/dispatch.py", "from ..windows import tile"),
        ("nodes/adapters/unet.py", "import comfy.ldm\nfrom ...toma_core import merge\nfrom .run import attach"),
        (
            "nodes/simple.py",
            "from comfy_api.latest import io\nfrom ..toma_core.config import C\nfrom .adapters import x",
        ),
        ("__init__.py", "async def comfy_entrypoint():\n    from .nodes import EXTENSION"),
        ("__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from comfy_api.latest import io"),
        ("scripts/run.py", "import os\nfrom scripts.console import say"),
    ],
)
def test_contract_allows(file: str, source: str) -> None:
    assert violations(file, source) == []


def reached(file: str, source: str, known: Collection[str]) -> Iterator[str]:
    """Return the modules of `known` that a file imports relatively, also inside functions and for type checking: a late
    import hides a circle. The implicit import of a module's package does not count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = "/".join([*file.split("/")[: -node.level], *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                places = (f"{base}/{alias.name}", base)
                paths = (path for place in places for path in (f"{place}.py", f"{place}/__init__.py"))
                yield from itertools.islice((path for path in paths if path in known), 1)


def circle(sources: Mapping[str, str]) -> list[str]:
    """Return modules that import each other in a circle, with the first one again at the end; empty if there is
    none."""
    try:
        TopologicalSorter({file: set(reached(file, text, sources)) for file, text in sources.items()}).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_circles() -> None:
    shipped = [file for file in files() if file.startswith(("toma_core/", "nodes/"))]
    assert circle({file: (ROOT / file).read_text(encoding="utf-8") for file in shipped}) == []


@loop(
    "sources",
    [
        {"a/b.py": "from .c import x", "a/c.py": "from .b import y"},
        {"a/b.py": "from . import c", "a/c.py": "from . import b"},
        {"a/b.py": "from .c import x", "a/c.py": "from .d import x", "a/d.py": "from .b import y"},
        {"a/b.py": "from .c import x", "a/c.py": "def f():\n    from .b import y"},
        {"a/b.py": "from .c import x", "a/c.py": "class C:\n    def f(self):\n        from . import b"},
        {
            "a/b.py": "from .c import x",
            "a/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import y",
        },
        {"a/b/__init__.py": "from .c import x", "a/b/c.py": "from . import y"},
        {
            "a/b/__init__.py": "from .c import x",
            "a/b/c.py": "from ..d import y",
            "a/d.py": "def f():\n    from . import b",
        },
        {"a/b/c.py": "from ...d.e import x", "d/e.py": "from ..a.b.c import y"},
    ],
)
def test_circles_are_found(sources: dict[str, str]) -> None:
    found = circle(sources)
    assert found[0] == found[-1]
    assert len(found) > 2


@loop(
    "sources",
    [
        {"a/b.py": "from .c import x", "a/c.py": "from torch import b"},
        {"a/__init__.py": "from .b import x\nfrom .c import x", "a/b.py": "from .c import x", "a/c.py": ""},
        {"a/b/__init__.py": "", "a/b/c.py": "from . import d", "a/b/d.py": "from ..e import b", "a/e.py": ""},
    ],
)
def test_what_is_no_circle_is_none(sources: dict[str, str]) -> None:
    assert circle(sources) == []


def own_files() -> list[Path]:
    return sorted(path for path in (ROOT / "tests").rglob("*.py"))


@loop("path", own_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_copy_of_the_core_per_test_file(path: Path) -> None:
    """`import toma_core` and the pack's own toma_core are two module objects whose classes do not match."""
    tops = {
        module if module.startswith("scripts") else module.partition(".")[0]
        for level, module, _, _ in imports(ast.parse(path.read_text(encoding="utf-8")))
        if not level
    }
    assert not {"toma_core", "scripts.comfy_pack"} <= tops
