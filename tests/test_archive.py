"""Test the archive that users install: its content, and a run in a ComfyUI without this checkout."""

import json
import re
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from demo.showcase_graphs import DIT, PICTURE, REPORT, place_dit, sampling_graph
from scripts import archive
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from scripts.console import SetupError

NAME = "toma-token-merge"  # ComfyUI-Manager and comfy-cli install into a folder of this name
FOR_USERS = {
    *("__init__.py", "nodes", "toma_core", "web", "locales", "workflows", "subgraphs"),
    *("pyproject.toml", "requirements.txt", "LICENSE", "README.md", "README.zh.md", "CHANGELOG.md"),
}


@pytest.fixture(scope="module")
def installed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom_nodes") / NAME
    with zipfile.ZipFile(packed) as zipped:
        zipped.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def fresh_server(installed: Path) -> Iterator[ComfyServer]:
    """Run a ComfyUI with the installed archive and the demo's nodes (for a tiny Flux), but without this checkout."""
    server = ComfyServer(packs=[installed, ROOT / "demo"], checkout=False)
    place_dit(server.base / "models")
    with server:
        yield server


def test_holds_what_a_user_needs_and_no_more(packed: Path) -> None:
    assert packed.name.startswith(f"{NAME}-")
    assert packed.stat().st_size < 2_000_000
    with zipfile.ZipFile(packed) as zipped:
        names = zipped.namelist()
    assert {name.split("/")[0] for name in names} == FOR_USERS
    assert {Path(name).suffix for name in names} <= {".py", ".js", ".mjs", ".md", ".json", ".jpg", ".toml", ".txt", ""}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git makes clones, and it is not here")
def test_clones_are_light(tmp_path: Path) -> None:
    """The README's sparse clone has every folder of the archive. GitHub's ZIP has no weights of the demo."""
    (folders,) = re.findall(r"sparse-checkout set ([\w ]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {*folders.split()} == {name for name in FOR_USERS if (ROOT / name).is_dir()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {path: path.stat().st_size for name in listed.split("\0") if (path := ROOT / name).is_file()}
    weights = sum(size for path, size in sizes.items() if path.suffix == ".safetensors")
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert 1_000_000 < sum(sizes.values()) - weights <= 12_000_000, largest
    assert sum(sizes.values()) <= 45_000_000, largest
    target = tmp_path / "github.zip"
    subprocess.run(["git", "archive", "--format=zip", f"--output={target}", "HEAD"], cwd=ROOT, check=True)
    assert target.stat().st_size < 4_500_000
    with zipfile.ZipFile(target) as zipped:
        assert not [name for name in zipped.namelist() if name.endswith(".safetensors")]


def test_two_at_once_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two packing runs in one checkout must not call comfy-cli at once, because both would write the same archive."""
    alone, comfy_node = threading.Lock(), archive._comfy_node

    def watched(command: str, root: Path) -> str:
        assert not alone.locked()
        with alone:
            return comfy_node(command, root)

    monkeypatch.setattr(archive, "_comfy_node", watched)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(archive.pack, (tmp_path / "one", tmp_path / "two"))
    assert zipfile.ZipFile(one).namelist() == zipfile.ZipFile(two).namelist()


def test_warnings_of_the_registry_stop_the_pack(tmp_path: Path) -> None:
    """comfy-cli only warns of an unknown accelerator, and then drops all accelerators. Packing must fail."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(text.replace("GPU :: NVIDIA CUDA", "GPU :: Abacus"))
    with pytest.raises(SetupError, match="Invalid Environment classifier"):
        archive.pack(tmp_path / "out", tmp_path)
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "bad.py").write_text("eval('1')\n")
    with pytest.raises(SetupError, match="S307"):
        archive.pack(tmp_path / "out", tmp_path)


def test_registry_gets_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read pyproject.toml with comfy-cli, because it drops fields that it does not understand."""
    from comfy_cli.registry.config_parser import extract_node_configuration

    monkeypatch.chdir(ROOT)
    config = extract_node_configuration()
    assert config is not None
    project, comfy = config.project, config.tool_comfy
    assert (project.name, project.license.file, project.dependencies) == (NAME, "LICENSE", [])
    assert (project.supported_os, project.supported_comfyui_version) == (["OS Independent"], ">=0.16.3")
    assert "GPU :: NVIDIA CUDA" in project.supported_accelerators
    assert comfy.publisher_id == "comfyui-toma"
    assert all((project.description, comfy.display_name))
    for url, size in ((comfy.icon, (400, 400)), (comfy.banner_url, (1260, 540))):
        base, _, path = url.partition("/main/")
        assert base == project.urls.repository.replace("//github.com", "//raw.githubusercontent.com")
        assert Image.open(ROOT / path).size == size


@pytest.mark.compat
def test_installed_pack_runs_a_graph(fresh_server: ComfyServer) -> None:
    for node_id in json.loads((ROOT / "tests/nodes/schema.json").read_text()):
        assert fresh_server.object_info(node_id)["python_module"] == f"custom_nodes.{NAME}"
    run = fresh_server.run(sampling_graph(DIT, 128, 4, seed=1, merged=True), timeout=120)
    assert run.status == "success", run.error
    assert re.search(r" [1-3] of 4 steps", run.outputs[REPORT]["text"][0]), "the others are full under the preset"
    assert fresh_server.view(run.outputs[PICTURE]["images"][0]).startswith(b"\x89PNG")


@pytest.mark.compat
def test_installed_pack_brings_its_pages(fresh_server: ComfyServer, installed: Path) -> None:
    pages = list((installed / "web").rglob("*.*"))
    assert installed / "web" / "docs" / "ToMA.md" in pages
    for page in pages:
        path = page.relative_to(installed / "web").as_posix()
        assert fresh_server.fetch(f"/extensions/{NAME}/{path}") == page.read_bytes()
    templates = {path.stem for path in (installed / "workflows").glob("*.json")}
    assert set(fresh_server.get("/api/workflow_templates")[NAME]) == templates != set()
    served = fresh_server.get("/i18n")
    for path in (installed / "locales").rglob("nodeDefs.json"):
        assert json.loads(path.read_text(encoding="utf-8")).items() <= served[path.parent.name]["nodeDefs"].items()
    blueprints = [entry["info"]["node_pack"] for entry in fresh_server.get("/global_subgraphs").values()]
    assert f"custom_nodes.{NAME}" in blueprints
