"""Test that every file of the archive and a running server keep the promises of SECURITY.md."""

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.showcase_graphs import DIT, sampling_graph
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

# Allowed imports: modules that open no files or connections, start no programs and execute no strings, except through
# the names in REFUSED_NAMES and REFUSED_ATTRIBUTES.
ALLOWED = {
    *("__future__", "abc", "collections", "contextlib", "contextvars", "copy", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "inspect", "itertools", "json", "logging", "math", "pathlib", "statistics", "string"),
    *("sys", "textwrap", "threading", "time", "types", "typing", "uuid", "weakref"),
    *("comfy", "comfy_api", "comfy_execution", "comfyui_version", "numpy", "PIL", "psutil", "torch", "triton"),
}
# Refused builtins, and refused attributes of all objects but `triton.language`, whose `load` reads GPU memory.
REFUSED_NAMES = {"eval", "exec", "compile", "open", "__import__", "breakpoint"}
REFUSED_ATTRIBUTES = {
    *("load", "save", "open", "fromfile", "tofile", "loadtxt", "savetxt", "genfromtxt", "memmap", "savez", "dump"),
    *("hub", "cpp_extension", "load_state_dict", "load_url", "download_url_to_file", "from_file", "package"),
    *("write", "write_text", "write_bytes", "read_text", "read_bytes", "unlink", "rmtree", "popen", "system"),
    *("mkdir", "touch", "rename", "rmdir", "symlink_to", "hardlink_to", "chmod"),
    *("add_routes", "add_route", "add_static", "routes", "router", "app", "middlewares"),
    *("environ", "getenv", "urlopen", "connect"),
    *("basicConfig", "FileHandler", "addHandler"),
}
# Scripts that the pack adds to ComfyUI's page, and the scripts of ComfyUI that they import.
SCRIPTS = {f"web/{name}.js" for name in ("toma", "notes", "presets", "texts", "timing")}
COMFYUI_SCRIPTS = {"../../scripts/api.js", "../../scripts/app.js"}
MARKUP = re.compile(r"<\s*(script|iframe|img|svg|object|embed|link|style)|javascript:|onerror\s*=")
TRITON = re.compile(r"^(tl|triton\.language)\b")


def complaints(source: str) -> Iterator[str]:
    """Yield the refused imports, names and attributes in the source code of a file."""
    for node in ast.walk(ast.parse(source)):
        modules, names = [], set[str]()
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [] if node.level else [node.module or ""]
            names = {alias.name for alias in node.names}
        for module in modules:
            top, *rest = module.split(".")
            if top not in ALLOWED or REFUSED_ATTRIBUTES & set(rest):
                yield f"import of {module}"
        yield from (f"import of {name}" for name in names & (REFUSED_ATTRIBUTES | REFUSED_NAMES))
        if isinstance(node, ast.Name) and node.id in REFUSED_NAMES and not isinstance(node.ctx, ast.Store):
            yield node.id
        is_refused = isinstance(node, ast.Attribute) and node.attr in REFUSED_ATTRIBUTES
        if is_refused and not TRITON.match(ast.unparse(node.value)):
            yield ast.unparse(node)


@pytest.fixture(scope="module")
def shipped(packed: Path) -> dict[str, str]:
    with zipfile.ZipFile(packed) as zipped:
        names = [name for name in zipped.namelist() if not name.endswith(("/", ".jpg"))]
        return {name: zipped.read(name).decode() for name in names}


def test_python_does_none_of_what_is_refused(shipped: dict[str, str]) -> None:
    files = {name: text for name, text in shipped.items() if name.endswith(".py")}
    assert {"__init__.py", "nodes/adapters/patch_model.py", "toma_core/kernels/triton/select.py"} <= set(files)
    # The pack reads two kinds of files: its own English texts, and the files in which Linux gives the limits of a
    # container.
    assert {f"{name}: {complaint}" for name, text in files.items() for complaint in complaints(text)} == {
        "nodes/widgets.py: (Path(__file__).parents[1] / 'locales' / 'en' / 'nodeDefs.json').read_text",
        "nodes/adapters/report_text.py: (Path(__file__).parents[2] / 'web' / 'i18n' / 'en.json').read_text",
        "nodes/adapters/kv_memory.py: (_CGROUPS / name).read_text",
        "nodes/adapters/kv_memory.py: (_CGROUPS / limit).with_name('memory.stat').read_text",
    }
    assert json.loads(shipped["web/i18n/en.json"])


# Lines of source code, each with one refused import, name or attribute.
REFUSED = (
    *("import socket", "import requests", "import importlib", "import os", "import torch.hub", "eval(x)", "f = exec"),
    *("from urllib import request", "from subprocess import run", "from torch import load", "torch.load(x)"),
    *("def f():\n    import pickle", "torch.utils.cpp_extension.load_inline(x)", "np.load(x, allow_pickle=True)"),
    *("Image.open(x)", "picture.save(x)", "compile(x, '', 'exec')", "open(x, 'w')", "__import__('os')", "os.environ"),
    *("x.tofile(path)", "path.write_text(x)", "app.router.add_get('/x', f)", "server.routes.get('/x')(f)"),
    "server.app.add_subapp('/x', other)",
)


def test_what_is_refused_is_found() -> None:
    assert [source for source in REFUSED if not list(complaints(source))] == []


def test_no_other_code_is_shipped(shipped: dict[str, str]) -> None:
    """There is no install script, requirement or binary. All code is Python, except the scripts for ComfyUI's page."""
    scripts = {name for name in shipped if Path(name).suffix in {".js", ".mjs"}}
    assert scripts == SCRIPTS
    assert not {"install.py", "prestartup_script.py", "setup.py"} & set(shipped)
    assert not [line for line in shipped["requirements.txt"].splitlines() if line.strip() and not line.startswith("#")]
    assert re.search(r"^dependencies = \[\]", shipped["pyproject.toml"], re.MULTILINE)


def test_script_of_the_page_speaks_to_its_page_alone(shipped: dict[str, str]) -> None:
    script = "\n".join(shipped[name] for name in SCRIPTS)
    imports = set(re.findall(r"""from\s+["']([^"']+)["']""", script))
    assert imports <= COMFYUI_SCRIPTS | {name.replace("web", ".") for name in SCRIPTS}
    texts = "fetch(new URL(`i18n/${language}.json`, import.meta.url))"
    assert script.count(texts) == 1, "its own texts"
    script = script.replace(texts, "")
    for word in (
        *("fetch", "XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon", "import(", "eval", "Function(", "http:"),
        *("https:", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "localStorage", "cookie"),
        *("postMessage", 'createElement("script', "api.fetchApi", 'setTimeout("', "srcdoc"),
    ):
        assert word not in script, word


def test_texts_of_the_nodes_hold_no_markup(shipped: dict[str, str]) -> None:
    """ComfyUI's page renders help, names and tooltips, so a translation must not contain a script."""
    for name, text in shipped.items():
        if name.startswith(("locales/", "web/docs/", "web/i18n/", "workflows/", "subgraphs/")):
            assert not MARKUP.search(text), name


def test_run_writes_into_comfyuis_folders_only_and_connects_to_nothing(lab: ComfyServer) -> None:
    before = files(lab.base)
    process = psutil.Process(lab.process.pid if lab.process else 0)
    peers: set[str] = set()

    def look(*_: object) -> None:
        for member in (process, *process.children(recursive=True)):
            peers.update(c.raddr.ip for c in member.net_connections("inet") if c.raddr)

    graph = sampling_graph(DIT, 64, 2, seed=77, merged=True, full_step_interval=0)
    run = lab.run(graph, on_message=look)
    assert run.status == "success", run.error
    assert "2 of 2 steps" in run.outputs["report"]["text"][0]
    assert peers == {"127.0.0.1"}
    written = {path.relative_to(lab.base).parts[0] for path in files(lab.base) - before}
    assert written <= {"temp", "output", "user"}
    assert {"temp", "output"} <= written


def files(base: Path) -> set[Path]:
    folders = [folder for folder in base.iterdir() if folder.name != "custom_nodes"]
    return {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_security_of_the_repository() -> None:
    """Without --strict, pip-audit passes even if it looked up no package. Ruff's rules "S" find insecure code."""
    assert "pip-audit --strict --requirement dev.txt" in (ROOT / ".github/workflows/audit.yml").read_text("utf-8")
    assert re.search(r'^select = \[.*"S"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
