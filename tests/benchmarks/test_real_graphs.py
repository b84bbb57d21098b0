"""Test benchmarks.real: the graphs that it queues, and the folder of pictures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import BenchmarkError
from benchmarks.real.graphs import Setting, Template, node, read_graph
from benchmarks.real.pictures import Folder, Job, plan, read_prompts

BALANCED = Setting(0.5, "balanced")
SECOND = {"14": node("PreviewImage", images=["11", 0])}
Graph = dict[str, dict[str, Any]]


@pytest.fixture
def graph() -> Graph:
    """Return a graph with numeric ids, a report, a second model patch, and a ratio from another node."""
    return {
        "4": node("CheckpointLoaderSimple", ckpt_name="mine.safetensors"),
        "5": node("PrimitiveFloat", value=0.3),
        "6": node("CLIPTextEncode", clip=["4", 1], text="a photo of %prompt%, sharp"),
        "7": node("CLIPTextEncode", clip=["4", 1], text="%negative%"),
        "8": node("ToMA", model=["4", 0], ratio=["5", 0], preset="quality"),
        "9": node("FreeU", model=["8", 0], b1=1.1),
        "10": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "3": node("KSampler", model=["9", 0], positive=["6", 0], negative=["7", 0], latent_image=["10", 0], seed=5),
        "11": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
        "12": node("SaveImage", images=["11", 0], filename_prefix="mine"),
        "13": node("ToMAReport", model=["9", 0], latent=["3", 0]),
    }


def test_fills_in_prompt_seed_and_setting(graph: Graph) -> None:
    template = Template(graph)
    merged, plain = (template.fill("a cat", "blur", 17, setting) for setting in (BALANCED, None))
    assert merged["6"]["inputs"]["text"] == "a photo of a cat, sharp"
    assert merged["7"]["inputs"]["text"] == "blur"
    assert merged["3"]["inputs"]["seed"] == 17
    assert merged["8"]["inputs"] == {"model": ["4", 0], "ratio": 0.5, "preset": "balanced"}
    assert merged["12"] == node("PreviewImage", images=["11", 0])
    # Both graphs lack the report node and the node that gave the ratio. The unmerged graph also lacks the ToMA node.
    # All other nodes are equal in both graphs.
    assert set(graph) - set(merged) == {"13", "5"}
    assert set(merged) - set(plain) == {"8"}
    assert plain["9"]["inputs"].pop("model") == ["4", 0]
    assert merged["9"]["inputs"].pop("model") == ["8", 0]
    assert all(merged[name] == plain[name] for name in plain)


@pytest.mark.parametrize(
    ("change", "output", "message"),
    [
        ({"8": node("FreeU", model=["4", 0])}, None, "ToMA, ToMAAdvanced; it has none"),
        ({"18": node("ToMA", model=["4", 0])}, None, r"it has 2 \(8, 18\)"),
        ({"9": node("FreeU", model=["4", 0])}, None, "does not lead to the picture"),
        (SECOND, None, "Name the node with --output"),
        (SECOND, "11", "no Save Image or Preview Image"),
        ({"6": node("CLIPTextEncode", clip=["4", 1], text="a cat")}, None, "no %prompt%"),
        ({"3": node("KSampler", model=["9", 0], positive=["6", 0], seed=["5", 0])}, None, "has no seed"),
    ],
)
def test_unfit_graphs_are_explained(graph: Graph, change: Graph, output: str | None, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        Template(graph | change, output)


def test_output_picks_one_of_several_pictures(graph: Graph) -> None:
    template = Template(graph | SECOND, "14")
    assert template.picture == "14"
    assert "12" not in template.graph


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_graph, "{", "cannot be read"),
        (read_graph, '{"nodes": [], "links": []}', "Export"),
        (read_graph, "[1]", "API format"),
        (read_prompts, "# nothing\n", "holds no prompt"),
        (read_prompts, None, "cannot be read"),
    ],
)
def test_unfit_files_are_explained(read: Callable[[Path], Any], text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        read(tmp_path / "file")


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps({"1": {**node("A", x=1), "_meta": {"title": "mine"}}}))
    assert read_graph(file) == {"1": node("A", x=1)}
    file.write_text("\ufeff# mine\na cat\n\n  a dog, naïve  \na cat\n", encoding="utf-8")
    assert read_prompts(file) == ["a cat", "a dog, naïve"]


def test_runs_with_more_than_sampling_are_not_timed(graph: Graph) -> None:
    template, warm = Template(graph), ["4", "6", "7", "10"]
    filled, plain = (template.fill("cat", "", 1, setting) for setting in (BALANCED, None))
    assert template.is_pure(filled, warm)
    assert template.is_pure(filled, [*warm, "8", "9"])  # the patched model may still be cached
    assert not template.is_pure(filled, ["4", "10"])  # node 4 encoded text
    assert not template.is_pure(filled, [])  # nothing was cached, so the model was loaded
    assert not template.is_pure(filled, list(filled))  # everything was cached
    assert template.is_pure(plain, [*warm, "9"])
    assert not template.is_pure(plain, [*warm, "9", "3"])


def test_every_setting_has_its_turn_to_be_first(graph: Graph) -> None:
    jobs = plan(Template(graph), ["a", "b"], "", [1, 2], [Setting(0.25, "quality"), BALANCED])
    names = [job.name for job in jobs]
    assert names[::3] == ["unmerged", "quality 0.25", "balanced 0.5", "unmerged"]
    assert len({job.key for job in jobs}) == 12
    assert all(len({(job.prompt, job.seed) for job in jobs[i : i + 3]}) == 1 for i in range(0, 12, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path)
    found.prepare({"device": "one card"})
    return found


def job(prompt: str = "a cat") -> Job:
    return Job(prompt, 1, None, {"1": node("A", text=prompt)})


def test_half_written_pictures_are_made_again(folder: Folder) -> None:
    for break_file in (lambda png: png.unlink(), lambda png: png.with_suffix(".json").write_text('{"seconds": 1.')):
        folder.save(job(), b"png", 1.5, True)
        record = folder.record(job())
        assert record is not None
        assert record["seconds"] == 1.5
        assert folder.record(job("a dog")) is None
        break_file(folder.picture(job()))
        assert folder.record(job()) is None


def test_other_conditions_are_refused(folder: Folder) -> None:
    folder.prepare({"device": "one card"})
    with pytest.raises(BenchmarkError, match=r"one card.*this server has.*another"):
        folder.prepare({"device": "another"})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_is_said_and_leaves_nothing_half(folder: Folder) -> None:
    (folder.pictures / f"{job().key}.json.part").symlink_to("/dev/full")
    with pytest.raises(BenchmarkError, match=r"\.json cannot be written \(No space left on device\)"):
        folder.save(job(), b"png", 1.0, True)
    assert folder.record(job()) is None
