"""Send many prompts to one server, from two clients at the same time. No prompt is lost, every latent equals the latent
of a fresh process, and no object of a run is left.

There are 12 prompts by default and 300 in `make soak`. TOMA_SOAK sets the number.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import gt
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.showcase_graphs import KINDS, UNET, place_dit, sampling_graph
from scripts.comfy_client import Run
from scripts.comfy_pack import pack_module
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from tests.stress.served import census, saved_latent

PROMPTS = int(os.environ.get("TOMA_SOAK", "12"))
LONG = PROMPTS >= 100
SEED = 20261121
config = pack_module("toma_core.config")
Graph = dict[str, Any]
# Small models with random weights, for families without a model in the demo.
OTHERS = ("flux2", "chroma", "z_image", "lumina2", "krea2", "qwen_image", "sd3", "wan", "hunyuan")


def random_settings(chance: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {"ratio": round(chance.uniform(0.05, 0.9), 2), "min_tokens": 16}
    # The interval is often 0, because with other intervals runs of one or two steps merge nothing.
    values["full_step_interval"] = chance.choice([0, 0, 2, 3])
    names = [item.name for item in fields(config.ToMAConfig) if item.name not in values]
    for name in chance.sample(names, chance.randint(0, 5)):
        spec = config.setting_spec(name)
        default = spec.default
        if isinstance(default, Enum):
            values[name] = chance.choice([member.value for member in type(default)])
        elif isinstance(default, bool):
            values[name] = not default
        elif isinstance(default, int):
            values[name] = chance.randint(int(spec.minimum), int(min(spec.maximum, spec.minimum + 10)))
        elif name in ("skip_first_blocks", "skip_last_blocks"):
            values[name] = chance.choice([0.2, 1.0, 2.0])
        else:
            values[name] = round(chance.uniform(spec.minimum, min(spec.maximum, 1000.0)), 2)
    try:
        config.ToMAConfig(**values)
    except config.ConfigError:  # the settings exclude each other
        return random_settings(chance)
    return values


def random_graph(chance: random.Random, seed: int) -> Graph:
    """Draw a graph with random size, model, sampler and settings. Each graph has its own seed, because ComfyUI would
    not sample the same graph twice."""
    kind, other = chance.choice(KINDS), chance.choice(OTHERS) if chance.random() < 0.4 else ""
    how = chance.choice(["advanced"] * 4 + ["simple", "without"])
    settings = random_settings(chance) if how == "advanced" else {}
    graph = sampling_graph(kind, 64, chance.randint(1, 4), seed, merged=how != "without", **settings)
    if kind is UNET:
        graph["loader"]["inputs"].update(weights="random", seed=chance.randint(0, 1))
    size = {"width": 8 * chance.randint(8, 16), "height": 8 * chance.randint(8, 16)}
    graph["empty"]["inputs"].update(size, batch_size=chance.choice([1, 1, 1, 2]))
    graph["scene"]["inputs"]["batch_size"] = graph["empty"]["inputs"]["batch_size"]
    graph["sampler"]["inputs"]["sampler_name"] = chance.choice(
        ["euler", "heun", "dpmpp_2m", "euler_ancestral", "uni_pc"]
    )
    graph["sampler"]["inputs"]["cfg"] = chance.choice([1.0, 2.0])
    if how == "simple":
        inputs = {"model": ["loader", 0], "ratio": 0.5, "preset": chance.choice(list(pack_module("toma_core").PRESETS))}
        graph["toma"] = {"class_type": "ToMA", "inputs": inputs}
    if chance.random() < 0.7 or other:
        del graph["picture"], graph["decode"]
    if other:
        inputs = {"family": other, "seed": chance.randint(0, 1), "faulty": False}
        graph["loader"] = {"class_type": "LabModel", "inputs": inputs}
        graph["empty"]["class_type"] = "EmptyLatentImage"
        if other in ("wan", "hunyuan"):
            graph["empty"]["class_type"] = "EmptyHunyuanLatentVideo"
            graph["empty"]["inputs"]["length"] = 9
        graph["sampler"]["inputs"].update(positive=["loader", 1], negative=["loader", 2])
        del graph["scene"]
    return graph


@dataclass
class Task:
    """One prompt and its result. stop_at: (kind, N) to interrupt the prompt at the Nth message of this kind."""

    graph: Graph
    stop_at: tuple[str, int] | None = None
    free: bool = False
    runs: list[Run] = field(default_factory=list)
    latent: str = ""


def tasks() -> list[Task]:
    chance = random.Random(SEED)  # noqa: S311 - cases, no secrets
    made = []
    for index in range(PROMPTS):
        stop = chance.choice([("progress", 1), ("progress", 2), ("executing", 2), ("execution_start", 1)])
        interrupted = index % 6 == 4
        made.append(Task(random_graph(chance, 1000 + index), stop if interrupted else None, free=index % 20 == 13))
    return made


def send(server: ComfyServer, tasks: list[Task], between: Callable[[], None] = lambda: None) -> None:
    """Send prompts in succession, interrupt some of them, and send the interrupted prompts again."""
    for task in tasks:
        if task.free:
            server.post("/free", {"unload_models": True, "free_memory": True})
        for stop_at in (task.stop_at, None) if task.stop_at else (None,):
            task.runs.append(server.run(task.graph, timeout=300, on_message=_stopper(server, stop_at)))
            if task.runs[-1].status != "interrupted":
                break
        task.latent = saved_latent(server, task.runs[-1])
        between()


def _stopper(server: ComfyServer, stop_at: tuple[str, int] | None) -> Callable[[str, Any], None]:
    seen = list[str]()

    def see(kind: str, data: Any) -> None:
        seen.append(kind)
        if stop_at and kind == stop_at[0] and seen.count(kind) == stop_at[1]:
            server.post("/interrupt", {"prompt_id": data["prompt_id"]})

    return see


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Graph], str]]:
    """fresh_process(graph): return the hash of the latent that a fresh process samples."""
    here = Path(__file__).parent
    base = tmp_path_factory.mktemp("fresh")
    ComfyServer(packs=[ROOT / "demo", here / "lab.py"], base=base)  # links the packs, but starts no server
    place_dit(base / "models")
    command = [sys.executable, str(here / "fresh.py"), "--base-directory", str(base), "--cpu", "--disable-api-nodes"]
    command += ["--use-pytorch-cross-attention", "--database-url", f"sqlite:///{base / 'user' / 'comfyui.db'}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (
        (base / "log").open("w") as log,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        to, back = process.stdin, process.stdout
        assert to is not None
        assert back is not None
        assert back.readline() == "ready\n", (base / "log").read_text()[-3000:]

        def ask(graph: Graph) -> str:
            print(json.dumps(graph), file=to, flush=True)
            answer = json.loads(back.readline())
            assert answer["status"] == "success", answer["status"]
            return str(answer["latent"])

        yield ask
        to.close()


def test_soak(lab: ComfyServer, fresh_process: Callable[[Graph], str]) -> None:
    process = psutil.Process(lab.process.pid if lab.process else 0)
    work = tasks()
    resident, counts, handles, done = list[int](), list[dict[str, Any]](), list[tuple[int, int]](), itertools.count(1)

    def open_handles() -> tuple[int, int]:
        return process.num_fds(), process.num_threads()

    def look() -> None:
        if next(done) % (5 if LONG else 1) == 0:
            counts.append(census(lab))
            handles.append(open_handles())
            resident.append(process.memory_info().rss)

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as clients:
        for sent in [clients.submit(send, lab, work[::2], look), clients.submit(send, lab, work[1::2])]:
            sent.result()
    seconds = time.monotonic() - begin

    history = lab.get("/history?max_items=100000")
    assert {run.prompt_id for task in work for run in task.runs} <= set(history)
    interrupts = sum(run.status == "interrupted" for task in work for run in task.runs)
    assert interrupts >= PROMPTS // 20, "nothing was interrupted in its course"

    begin = time.monotonic()
    wrong = [index for index, task in enumerate(work) if fresh_process(task.graph) != task.latent]
    fresh_seconds = time.monotonic() - begin

    counts.append(census(lab))
    # Compare handles with the middle of the run, because the database and the event loop open some handles after the
    # first count. Allow two more threads in a short run, in which the server's thread pool still grows.
    files, threads = handles[len(handles) // 2]
    allowed = files + 1, threads + (0 if LONG else 2)
    deadline = time.monotonic() + 60  # the server closes connections later than the client does
    while any(map(gt, open_handles(), allowed)) and time.monotonic() < deadline:
        time.sleep(0.1)
    handles.append(open_handles())
    # The first third of the run is the warm-up.
    n = len(resident) // 3
    second, third = statistics.median(resident[n : 2 * n]), statistics.median(resident[-n:])
    figures = {
        **{"prompts": PROMPTS, "interrupted": interrupts, "wrong": len(wrong), "seconds": round(seconds, 1)},
        **{"seconds_fresh": round(fresh_seconds, 1), "resident_mb_middle": round(second / 1e6, 1)},
        **{"resident_mb_end": round(third / 1e6, 1), "growth_percent": round(100 * (third / second - 1), 2)},
        **{"handles": handles, "tensor_mb": [round(c["tensor_bytes"] / 1e6, 2) for c in counts]},
        "objects_at_the_end": counts[-1]["objects"],
    }
    print(json.dumps(figures))

    assert wrong == []
    assert not any(map(gt, handles[-1], allowed)), f"open files and threads: {handles}"
    if LONG:
        assert abs(third / second - 1) <= 0.02, f"memory in MB: {[round(size / 1e6) for size in resident]}"
