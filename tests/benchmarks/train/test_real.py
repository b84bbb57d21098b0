"""Test benchmarks.real on a real server with a tiny model: a complete run, a repeated run, and all errors."""

import _thread
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.real import __main__ as real
from benchmarks.real.graphs import Setting, Template, node
from benchmarks.real.server import Server
from demo.showcase_graphs import UNET, sampling_graph
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

HURDLE = '''
import time
import comfy.model_management

class Hurdle:
    """Passes a picture on, or not."""
    INPUT_TYPES = classmethod(lambda cls: {"required": {"images": ("IMAGE",), "text": ("STRING", {})}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "work", "test"

    def work(self, images, text):
        if text == "break":
            raise ValueError("cannot draw that")
        if text == "wait":
            print("the hurdle waits", flush=True)
        while text == "wait":
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.02)
        return (images,)

NODE_CLASS_MAPPINGS = {"TestHurdle": Hurdle}
'''


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Run a server with the demo's nodes and a node that can fail or wait. The last test stops the server."""
    pack = tmp_path_factory.mktemp("packs") / "hurdle-pack"
    pack.mkdir()
    (pack / "__init__.py").write_text(HURDLE)
    with ComfyServer(packs=[ROOT / "demo", pack]) as running:
        yield running


@pytest.fixture
def graph() -> dict[str, Any]:
    """Return a graph of the demo's tiny UNet, 16 x 16 tokens, with the ToMA node. A prompt is the number of a scene."""
    found = sampling_graph(UNET, 64, 3, 0, merged=True)
    found["toma"] = node("ToMA", model=["loader", 0], ratio=0.1, preset="quality")
    found["scene"]["inputs"]["seed"] = "%prompt%"
    # The seed of the random weights comes from another node, so benchmarks.real must not change it.
    found["fixed"] = node("PrimitiveInt", value=0)
    found["loader"]["inputs"]["seed"] = ["fixed", 0]
    return found


@pytest.fixture
def hurdle(graph: dict[str, Any]) -> dict[str, Any]:
    """Return a graph with a node that fails if the prompt is "break", and waits if it is "wait"."""
    graph["scene"]["inputs"]["seed"] = 7
    graph["hurdle"] = node("TestHurdle", images=["decode", 0], text="%prompt%")
    graph["picture"]["inputs"]["images"] = ["hurdle", 0]
    return graph


class Work:
    """Runs `benchmarks.real` in this process, with a folder for its results."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.out = folder, url, folder / "out"

    def run(self, graph: dict[str, Any], prompts: str, *more: str) -> int:
        (self.folder / "graph.json").write_text(json.dumps(graph))
        (self.folder / "prompts.txt").write_text(prompts)
        files = ["--graph", str(self.folder / "graph.json"), "--prompts", str(self.folder / "prompts.txt")]
        return real.main(["--server", self.url, *files, "--out", str(self.out), *more])


@pytest.fixture
def work(comfy: ComfyServer, tmp_path: Path) -> Iterator[Work]:
    """Yield a `Work`. After the test, clear the server's queue."""
    yield Work(tmp_path, comfy.url)
    if comfy.process is not None:
        comfy.post("/queue", {"clear": True})
        wait_until(lambda: idle(comfy) or comfy.interrupt())


def idle(comfy: ComfyServer) -> bool:
    return not comfy.get("/queue")["queue_running"]


def wait_until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def while_waiting(comfy: ComfyServer, act: Callable[[], Any]) -> threading.Thread:
    """Start a thread that calls `act` when the hurdle node begins to wait. ComfyUI would forget an earlier
    interrupt."""
    seen = comfy.log().count("the hurdle waits")

    def watch() -> None:
        wait_until(lambda: comfy.log().count("the hurdle waits") > seen)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_complete_run_and_a_repeated_run(
    comfy: ComfyServer, work: Work, graph: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seeds", "1", "2", "--ratio", "0.25", "0.5", "--preset", "balanced"]
    assert work.run(graph, "# scenes\n11\n12\n", *options) == 0
    out, err = capsys.readouterr()
    assert "12 pictures wanted, 0 are there, 12 to make" in err
    assert "12/12  balanced 0.5, seed 2, '12'; 0 s left" in err
    rows = {line.split(" | ")[0].strip("| ") for line in out.splitlines() if line.startswith("|")}
    assert {"unmerged", "balanced 0.25", "balanced 0.5", "another seed"} <= rows
    assert "Measured on cpu, ComfyUI " in out
    queued = len(comfy.get("/history"))

    data = json.loads((work.out / "results.json").read_text())
    plain, quarter, half, other = data["settings"]
    assert [s["pictures"] for s in data["settings"]] == [4, 4, 4, 2]
    assert plain["timed"] >= 1
    assert quarter["timed"] >= 1
    assert half["seconds"] > 0
    assert half["speedup"] == pytest.approx(plain["seconds"] / half["seconds"])
    for merged in (quarter, half):
        assert merged["identical"] == 0
        assert other["figures"]["SSIM"] < merged["figures"]["SSIM"] < 1
    assert {Image.open(work.out / "pictures" / pair["picture"]).size for pair in data["pairs"]} == {(128, 128)}
    shown = re.findall(r'src="([^"]+)"', (work.out / "index.html").read_text(encoding="utf-8"))
    assert len(shown) == 16
    assert all((work.out / file).is_file() for file in shown)

    # A repeated run queues nothing. With an additional seed, only pictures of that seed are queued.
    assert work.run(graph, "11\n12\n", *options) == 0
    assert "12 are there, 0 to make" in capsys.readouterr().err
    assert len(comfy.get("/history")) == queued
    assert json.loads((work.out / "results.json").read_text())["settings"] == data["settings"]
    assert work.run(graph, "11\n", *options[:3], "3", *options[3:]) == 0
    assert "9 pictures wanted, 6 are there, 3 to make" in capsys.readouterr().err
    assert len(comfy.get("/history")) == queued + 3


def test_what_the_server_refuses_is_said(work: Work, graph: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert work.run(graph, "11\n", "--seeds", "1", "--ratio", "2") == 1
    assert re.search(r"ToMA \(node toma\): .*ratio", capsys.readouterr().err)
    common = ["--server", work.url, "--prompts", str(work.folder / "prompts.txt"), "--out", str(work.out)]
    assert real.main([*common, "--checkpoint", "none.safetensors"]) == 1
    err = capsys.readouterr().err
    assert re.search(r"CheckpointLoaderSimple \(node loader\): .*ckpt_name.*none", err)
    assert err.count(" (node ") == 1, "the server accepts all else of the built-in graph"


def test_failed_interrupted_and_lost_runs_are_said_and_other_results_remain(
    comfy: ComfyServer,
    work: Work,
    hurdle: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def error(prompts: str) -> str:
        assert work.run(hurdle, prompts, "--seeds", "1") == 1
        return capsys.readouterr().err

    assert "ComfyUI failed in TestHurdle (node hurdle): cannot draw that" in error("fine\nbreak\n")
    assert len(list((work.out / "pictures").glob("*.json"))) == 2
    assert work.run(hurdle, "fine\n", "--seeds", "1") == 0
    assert "2 are there, 0 to make" in capsys.readouterr().err

    thread = while_waiting(comfy, comfy.interrupt)
    assert "interrupted on the server. Run the same command again" in error("wait\n")
    thread.join()

    # Another prompt blocks the queue. After LONGEST seconds, benchmarks.real concludes that its own prompt was removed.
    monkeypatch.setattr("benchmarks.real.server.LONGEST", 1.0)
    other = comfy.queue(Template(hurdle).fill("wait", "", 99, None))
    assert "was the server's queue cleared?" in error("better\n")
    assert other in json.dumps(comfy.get("/queue")), "it was not interrupted"


def test_ctrl_c_takes_only_its_own_prompt_away(
    comfy: ComfyServer, work: Work, hurdle: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # A process that a shell runs in the background ignores Ctrl-C, so set Python's usual handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = while_waiting(comfy, _thread.interrupt_main)
        assert work.run(hurdle, "fine\nwait\n", "--seeds", "1") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert "Stopped. Run the same command again to go on" in capsys.readouterr().err
    wait_until(lambda: idle(comfy))
    assert len(list((work.out / "pictures").glob("*.png"))) == 2


def test_server_without_the_pack_or_no_comfyui(comfy: ComfyServer) -> None:
    with pytest.raises(real.BenchmarkError, match="has no node ToMANever: put ComfyUI-ToMA into its custom_nodes"):
        Server(comfy.url).default("ToMANever", "ratio")
    assert Server(comfy.url).default("ToMA", "ratio") == 0.5
    with pytest.raises(real.BenchmarkError, match="not as ComfyUI does"):
        Server(f"{comfy.url}/nowhere").conditions()
    with pytest.raises(real.BenchmarkError, match="does not answer"):
        Server("http://here:port").conditions()


def test_settings_are_those_of_the_node_where_nothing_is_asked_for(graph: dict[str, Any], comfy: ComfyServer) -> None:
    graph["toma"] = node("ToMAAdvanced", model=["loader", 0], ratio=0.4, preset="quality")

    def settings(*more: str) -> list[Setting]:
        arguments = ["--graph", "g", "--prompts", "p", *more]
        return real.settings_of(real.parser().parse_args(arguments), Template(graph), Server(comfy.url))

    assert settings() == [Setting(0.4, "quality")]
    assert settings("--preset", "quality", "paper") == [Setting(0.4, "quality"), Setting(0.4, "paper")]
    graph["toma"]["inputs"]["profile"] = "{}"
    assert settings() == [Setting(0.4, "quality", "{}")]
    assert settings("--ratio", "0.3") == [Setting(0.3, "quality")], "beside a profile it would do nothing"
    graph["toma"]["inputs"]["profile"] = ["text", 0]
    assert settings("--preset", "quality") == [Setting(0.4, "quality")]
    with pytest.raises(real.BenchmarkError, match="comes from another node: paste its text"):
        settings()
    del graph["toma"]["inputs"]["profile"], graph["toma"]["inputs"]["ratio"]
    assert settings() == [Setting(0.5, "quality")]


def test_server_that_goes_away_is_said(
    comfy: ComfyServer, work: Work, hurdle: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    thread = while_waiting(comfy, comfy.stop)
    assert work.run(hurdle, "fine\nwait\n", "--seeds", "1") == 1
    thread.join()
    err = capsys.readouterr().err
    assert f"{work.url} does not answer" in err
    assert "Run the same command again to go on" in err
    assert len(list((work.out / "pictures").glob("*.png"))) == 2
    assert work.run(hurdle, "fine\n", "--seeds", "1") == 1
    assert "Is ComfyUI running there?" in capsys.readouterr().err
