"""Test benchmarks.real: the graphs that it queues, and the folder of pictures."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import BenchmarkError
from benchmarks.real.graphs import Setting, Template, key_of, node, read_graph
from benchmarks.real.pictures import Folder, Job, plan, read_prompts
from tests.loop import loop

BALANCED = Setting(0.5, "balanced")
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
    # The report node and the node that gives the ratio are removed. The unmerged graph also lacks the ToMA node. All
    # other nodes are equal in both graphs.
    assert set(graph) - set(merged) == {"13", "5"}
    assert set(merged) - set(plain) == {"8"}
    assert plain["9"]["inputs"].pop("model") == ["4", 0]
    assert merged["9"]["inputs"].pop("model") == ["8", 0]
    assert all(merged[name] == plain[name] for name in plain)


@loop(
    ("change", "message"),
    [
        ({"8": node("FreeU", model=["4", 0])}, "ToMA, ToMAAdvanced; it has none"),
        ({"18": node("ToMA", model=["4", 0])}, r"it has 2 \(8, 18\)"),
        ({"9": node("FreeU", model=["4", 0])}, "does not lead to the picture"),
        ({"14": node("PreviewImage", images=["11", 0])}, "Name the node with --output"),
        ({"6": node("CLIPTextEncode", clip=["4", 1], text="a cat")}, "no %prompt%"),
        ({"3": node("KSampler", model=["9", 0], positive=["6", 0], seed=["5", 0])}, "has no seed"),
    ],
)
def test_unfit_graphs_are_explained(graph: Graph, change: Graph, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        Template(graph | change)


def test_output_picks_one_of_several_pictures(graph: Graph) -> None:
    graph["14"] = node("PreviewImage", images=["11", 0])
    assert Template(graph, "14").picture == "14"
    assert "12" not in Template(graph, "14").graph
    with pytest.raises(BenchmarkError, match="no Save Image or Preview Image"):
        Template(graph, "11")


def test_files_that_are_no_graph_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    for text, message in (("{", "cannot be read"), ('{"nodes": [], "links": []}', "Export"), ("[1]", "API format")):
        file.write_text(text)
        with pytest.raises(BenchmarkError, match=message):
            read_graph(file)
    file.write_text(json.dumps({"1": {**node("A", x=1), "_meta": {"title": "mine"}}}))
    assert read_graph(file) == {"1": node("A", x=1)}


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


def test_keys_change_with_everything_that_makes_a_picture(graph: Graph) -> None:
    template = Template(graph)
    base = template.fill("cat", "", 1, BALANCED)
    assert key_of(base) == key_of(copy.deepcopy(base))
    prompts = [("dog", "", 1), ("cat", "blur", 1), ("cat", "", 2)]
    others = [template.fill(*prompt, BALANCED) for prompt in prompts]
    others += [template.fill("cat", "", 1, s) for s in (Setting(0.25, "balanced"), Setting(0.5, "quality"), None)]
    assert len({key_of(other) for other in [base, *others]}) == 7


def test_every_setting_has_its_turn_to_be_first(graph: Graph) -> None:
    jobs = plan(Template(graph), ["a", "b"], "", [1, 2], [Setting(0.25, "quality"), BALANCED])
    names = [job.name for job in jobs]
    assert names[::3] == ["unmerged", "quality 0.25", "balanced 0.5", "unmerged"]
    assert len({job.key for job in jobs}) == 12
    assert all(len({(job.prompt, job.seed) for job in jobs[i : i + 3]}) == 1 for i in range(0, 12, 3))


def test_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeff# mine\na cat\n\n  a dog, naïve  \na cat\n", encoding="utf-8")
    assert read_prompts(file) == ["a cat", "a dog, naïve"]
    file.write_text("# nothing\n")
    with pytest.raises(BenchmarkError, match="holds no prompt"):
        read_prompts(file)
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")


def job(prompt: str = "a cat") -> Job:
    return Job(prompt, 1, None, {"1": node("A", text=prompt)})


def test_half_written_pictures_are_made_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.prepare({"device": "cpu"})
    folder.save(job(), b"png", 1.5, True)
    record = folder.record(job())
    assert record is not None
    assert record["seconds"] == 1.5
    assert folder.record(job("a dog")) is None
    folder.picture(job()).with_suffix(".json").write_text('{"seconds": 1.')
    assert folder.record(job()) is None
    folder.save(job(), b"png", 1.5, True)
    folder.picture(job()).unlink()
    assert folder.record(job()) is None


def test_other_conditions_are_refused(tmp_path: Path) -> None:
    for _ in range(2):
        Folder(tmp_path).prepare({"device": "one card"})
    with pytest.raises(BenchmarkError, match=r"one card.*this server has.*another"):
        Folder(tmp_path).prepare({"device": "another"})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_is_said_and_leaves_nothing_half(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.prepare({})
    (folder.pictures / f"{job().key}.json.part").symlink_to("/dev/full")
    with pytest.raises(BenchmarkError, match=r"\.json cannot be written \(No space left on device\)"):
        folder.save(job(), b"png", 1.0, True)
    assert folder.record(job()) is None
