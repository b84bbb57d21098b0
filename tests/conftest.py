"""Provide fixtures for all tests: ComfyUI on the import path, the loaded pack, and one real server."""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from scripts import archive
from scripts.comfy_pack import load_pack, use_comfyui
from scripts.comfy_server import ComfyServer
from testbed.stand_ins import use_newer_models

TESTS = Path(__file__).parent
# Folders of tests that `make test` leaves out because they take long, with their content. The longest tests come first,
# so that no worker runs one alone at the end.
TIERS = {
    "stress": "faults, fuzz, numerics, security and long use",
    "train": "trained models: trainings, measurements, the demo",
    "thorough": "tests of `make test` with their other models, samplers and settings",
    "matrix": "every row of the compatibility matrix",
    "fullsize": "models as large as their checkpoints",
    "compile": "torch.compile on models of every family",
    "triton": "kernels in Triton's interpreter and compiler",
    "gpu": "the kit for a GPU machine, rehearsed without one",
    "server": "a real server; also tests anywhere that use a fixture named so, or ..._server",
    "benchmarks": "measuring, and the pages that show it",
    "demo": "the demo and its scenes",
    "browser": "the web page in Chromium",
}
if os.environ.get("COMFYUI_PATH"):
    use_comfyui()
    use_newer_models()

# Without a GPU, Triton's interpreter runs the kernels. TRITON_INTERPRET must be set before ComfyUI imports Triton.
if find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# In CI, Hypothesis tries the same examples in every run. Elsewhere it draws new examples. Examples have no time limit,
# because machines differ in speed.
hypothesis.settings.register_profile("desk", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiers", choices=("none", "only", "all"), default="none", help="tests that take long")


def pytest_configure(config: pytest.Config) -> None:
    """Include the long tests if the user selects tests by path or marker."""
    if not os.environ.get("COMFYUI_PATH"):
        raise pytest.UsageError("tests need ComfyUI: run them with `make test`, or set COMFYUI_PATH to its folder")
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if config.option.tiers == "none" and (config.option.markexpr or all(TESTS in path.parents for path in paths)):
        config.option.tiers = "all"


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test, or "" for a test that `make test` runs."""
    for folder in reversed(item.path.relative_to(TESTS).parts[:-1]):
        if folder in TIERS:
            return folder
    used = getattr(item, "fixturenames", ())
    return "server" if item.path.stem != "test_server_smoke" and any(n.endswith("server") for n in used) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    tiers = {item: tier_of(item) for item in items}
    skipped_by_settings = {"none": True, "only": False, "all": None}[config.option.tiers]
    config.hook.pytest_deselected(items=[item for item in items if bool(tiers[item]) is skipped_by_settings])
    order = {name: index for index, name in enumerate((*TIERS, ""))}
    # Browser tests run last, because Playwright's event loop occupies the main thread until the browser closes.
    order["browser"] = len(order)
    items[:] = sorted((i for i in items if bool(tiers[i]) is not skipped_by_settings), key=lambda i: order[tiers[i]])
    for item in items:
        if config.pluginmanager.hasplugin("xdist"):
            shared = "browser" if tiers[item] == "browser" else "server" if "server" in item.fixturenames else ""
            item.add_marker(pytest.mark.xdist_group(shared or str(item.path.relative_to(TESTS))))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> None:
    """Exclude objects of earlier test modules from garbage collection.

    ComfyUI calls `gc.collect()` often, and each call visits all objects of torch, ComfyUI and pytest.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """Return the pack's root module, loaded as ComfyUI does. For submodules use `scripts.comfy_pack.pack_module`."""
    return load_pack()


@pytest.fixture(scope="session")
def server() -> Iterator[ComfyServer]:
    """Run one ComfyUI with the pack for all tests. Tests must leave its queue empty."""
    with ComfyServer() as running:
        yield running


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive that is uploaded to the registry."""
    return archive.pack(tmp_path_factory.mktemp("packed"))
