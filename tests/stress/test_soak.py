"""Send many prompts to one server, from two clients at the same time. No prompt is lost, and no object of a run
is left. Every latent equals the latent of a second server, which runs the prompts one by one in reverse order.

There are 12 prompts by default and 300 in `make soak`. TOMA_SOAK sets the number.
"""

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import psutil

from demo.showcase_graphs import KINDS, UNET, sampling_graph
from scripts.comfy_client import Run
from scripts.comfy_pack import pack_module
from scripts.comfy_server import ComfyServer
from tests.stress.conftest import new_lab
from tests.stress.served import census, saved_latent

PROMPTS = int(os.environ.get("TOMA_SOAK", "12"))
LONG = PROMPTS >= 100
SEED = 20261121
config = pack_module("toma_core.config")
Graph = dict[str, Any]
# Small models with random weights, for families without a model in the demo.
OTHERS = ("flux2", "chroma", "z_image", "lumina2", "krea2", "qwen_image", "sd3", "wan", "hunyuan")


# `full_step_interval` is often 0, because with other intervals runs of one or two steps merge nothing.
CHOICES: dict[str, list[Any]] = {
    "full_step_interval": [0, 0, 2, 3], "ratio": [0.05, 0.3, 0.6, 0.9], "min_tokens": [16],
    "granularity": [member.value for member in config.Granularity], "merge_references": [False, True],
    "kv_cache": [member.value for member in config.KVCache],
    "skip_first_blocks": [0.0, 0.2, 2.0], "skip_last_blocks": [0.0, 1.0], "start_percent": [0.0, 0.0, 0.2],
    "end_percent": [1.0, 1.0, 0.6], "selection_interval": [1, 3, 10], "window_size": [2, 8, 13],
    "sharpness": [1.0, 300.0, 1000.0],
}  # fmt: skip


def random_graph(chance: random.Random, seed: int) -> Graph:
    """Draw a graph with random size, model, sampler and settings. Each graph has its own seed, because ComfyUI would
    not sample the same graph twice."""
    kind, other = chance.choice(KINDS), chance.choice(OTHERS) if chance.random() < 0.4 else ""
    how = chance.choice(["advanced"] * 4 + ["simple", "without"])
    settings = {name: chance.choice(values) for name, values in CHOICES.items()} if how == "advanced" else {}
    graph = sampling_graph(kind, 64, chance.randint(1, 4), seed, merged=how != "without", **settings)
    if kind is UNET:
        graph["loader"]["inputs"].update(weights="random", seed=chance.randint(0, 1))
    size = {"width": 8 * chance.randint(8, 16), "height": 8 * chance.randint(8, 16)}
    graph["empty"]["inputs"].update(size, batch_size=chance.choice([1, 1, 1, 2]))
    graph["scene"]["inputs"]["batch_size"] = graph["empty"]["inputs"]["batch_size"]
    sampler = chance.choice(["euler", "heun", "dpmpp_2m", "euler_ancestral", "uni_pc"])
    graph["sampler"]["inputs"].update(sampler_name=sampler, cfg=chance.choice([1.0, 2.0]))
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
        made.append(Task(random_graph(chance, 1000 + index), stop if interrupted else None, free=index % 6 == 1))
    return made


def send(server: ComfyServer, tasks: list[Task], between: Callable[[], None] = lambda: None) -> None:
    """Send prompts one after another, interrupt some, and send the interrupted ones again. Before some prompts, free
    memory, even if the server is running a prompt of the other client."""
    for task in tasks:
        if task.free:
            server.post("/free", {"unload_models": True, "free_memory": True})
        task.runs.append(server.run(task.graph, on_message=stopper(server, task.stop_at)))
        if task.stop_at and task.runs[-1].status == "interrupted":
            task.runs.append(server.run(task.graph))
        task.latent = saved_latent(server, task.runs[-1])
        between()


def stopper(server: ComfyServer, stop_at: tuple[str, int] | None) -> Callable[[str, Any], None]:
    seen = list[str]()

    def see(kind: str, data: Any) -> None:
        seen.append(kind)
        if stop_at == (kind, seen.count(kind)):
            server.post("/interrupt", {"prompt_id": data["prompt_id"]})

    return see


def test_soak(lab: ComfyServer) -> None:
    process = psutil.Process(lab.process.pid if lab.process else 0)
    work = tasks()
    resident, handles, done = list[int](), list[tuple[int, int]](), itertools.count(1)

    def open_handles() -> tuple[int, int]:
        return process.num_fds(), process.num_threads()

    def look() -> None:
        if next(done) % (5 if LONG else 1) == 0:
            census(lab)
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

    with new_lab() as other:
        wrong = [task.graph for task in work[::-1] if saved_latent(other, other.run(task.graph)) != task.latent]

    # Compare the open files and threads with those in the middle of the run, because the database and the event loop
    # open some after the first count. Allow two more threads in a short run, in which the server's thread pool still
    # grows.
    files, threads = handles[len(handles) // 2]
    allowed = files + 1, threads + (0 if LONG else 2)
    deadline = time.monotonic() + 60  # the server closes connections later than the client does
    while any(map(gt, open_handles(), allowed)) and time.monotonic() < deadline:
        time.sleep(0.1)
    handles.append(open_handles())
    # The first third of the run is the warm-up.
    n = len(resident) // 3
    second, third = statistics.median(resident[n : 2 * n]), statistics.median(resident[-n:])
    megabytes = [round(size / 1e6, 1) for size in (second, third)]
    print({"interrupted": interrupts, "seconds": round(seconds), "megabytes": megabytes, "handles": handles})
    assert wrong == []
    assert not any(map(gt, handles[-1], allowed)), f"open files and threads: {handles}"
    if LONG:
        assert abs(third / second - 1) <= 0.02, f"memory in MB: {megabytes}"
