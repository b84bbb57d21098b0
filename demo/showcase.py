"""The demo: a real ComfyUI server runs real models with and without ToMA, and the results are compared."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from scripts.comfy_client import PromptError, Run
from scripts.comfy_server import ComfyServer, free_port
from scripts.comfyui import ROOT

from .checker import FIRST_TEST_SEED
from .scenes import CANVAS
from .showcase_graphs import DIT, LATENT, PICTURE, REPORT, UNET, Kind, place_dit, sampling_graph
from .showcase_results import Case, Outcome, StepClock, explanation, merge_maps, opened, side_by_side, table

OUTPUT = ROOT / "demo-output"
WORKFLOWS = ROOT / "demo" / "workflows"
# The workflow that the page opens, and the page's port unless another program uses that port.
_FIRST, _PORT = "Demo-SDXL", 8199
EVERYWHERE = "0.0.0.0"  # noqa: S104 - all addresses of this machine, only with `--listen`
_HERE = "127.0.0.1"
# Pictures per batch. The models are narrow, so one picture is too little work for merging to pay, above all on a GPU.
BATCH = {"cpu": 4, "cuda": 64}
WARM_UP_STEPS = 3  # a full step, a merged step and a full step
TIMING_STEPS = 5  # for runs that are only timed, with the same share of merged steps as longer runs


class DemoError(RuntimeError):
    """The demo cannot continue. The message has the reason."""


@dataclass(frozen=True)
class Settings:
    """Settings of the demo: picture sizes in pixels, sampling steps (None: as many as suit the model), pairs per case,
    and pictures per batch."""

    sizes: tuple[int, ...] = (CANVAS,)
    steps: int | None = None
    repeats: int = 3
    batch: int = BATCH["cuda" if torch.cuda.is_available() else "cpu"]
    kinds: tuple[Kind, ...] = (UNET,)  # without the tiny Flux, whose 32 x 32 tokens are too few for a gain


def device_name() -> str:
    """Return the name of the device that the server uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


@contextmanager
def demo_server(base: Path | None = None, port: int | None = None, listen: str | None = None) -> Iterator[ComfyServer]:
    """Run a server with the pack, the demo nodes and the demo checkpoint, and stop it at the end. listen: addresses of
    this machine to listen on in addition to 127.0.0.1, separated by commas."""
    # Use PyTorch's attention. ComfyUI's default on the CPU works in slices and is several times slower, so ToMA would
    # seem to gain more.
    flags = ["--use-pytorch-cross-attention"]
    if listen:
        # List every address once, because ComfyUI does not start if one is listed twice.
        others = [a for each in listen.split(",") if (a := each.strip()) not in ("", _HERE, "localhost")]
        flags += ["--listen", ",".join(others if EVERYWHERE in others else [_HERE, *others])]
    # Waiting threads must sleep. If they spin while another program is busy, steps get many times slower.
    environ = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    server = ComfyServer(packs=[ROOT / "demo"], base=base, port=port, flags=flags, environ=environ)
    try:
        place_dit(server.base / "models")
        begin = time.monotonic()
        say(f"==> Starting ComfyUI on {device_name()}")
        server.start()
        say(f"    ready after {time.monotonic() - begin:.0f} s at {server.url}")
        yield server
    finally:
        server.stop()


def run_all(server: ComfyServer, settings: Settings) -> list[Case]:
    """Run every model at every size: a warm-up, then pairs of runs with and without ToMA."""
    cases = [
        Case(kind, pixels, steps=settings.steps or kind.steps, batch=settings.batch)
        for kind in settings.kinds
        for pixels in settings.sizes
    ]
    for number, case in enumerate(cases, 1):
        weights = "trained weights" if case.kind.trained else "random weights"
        say(f"==> {number}/{len(cases)} {case.name}, {weights}")
        for merged in (False, True):
            _sample(server, case, f"warm-up {_way(merged)}", merged, FIRST_TEST_SEED, WARM_UP_STEPS)
        steps = case.steps if case.draws else min(case.steps, TIMING_STEPS)
        for repeat in range(settings.repeats):
            # The order alternates from pair to pair, so that a machine that slows down favours neither run of a pair.
            for merged in (False, True) if repeat % 2 == 0 else (True, False):
                title = f"pair {repeat + 1}/{settings.repeats} {_way(merged)}"
                outcome = _sample(server, case, title, merged, FIRST_TEST_SEED + repeat * settings.batch, steps)
                (case.merged if merged else case.plain).append(outcome)
        say(f"    {case.tokens} tokens: {case.faster}")
    return cases


def _way(merged: bool) -> str:
    return "with ToMA" if merged else "without"


def _sample(server: ComfyServer, case: Case, title: str, merged: bool, seed: int, steps: int) -> Outcome:
    counter = _Counter(f"    {title}")
    clock = StepClock(time.perf_counter, counter)
    graph = sampling_graph(case.kind, case.pixels, steps, seed, merged, case.batch)
    try:
        run = server.run(graph, on_message=clock, timeout=600)
    except PromptError as error:
        raise DemoError(f"ComfyUI refused the graph of {case.name}:\n{error}") from error
    if run.error is not None:
        raise DemoError(f"{case.name} failed in {run.error['node_type']}: {run.error['exception_message']}")
    if run.status != "success":
        raise DemoError(f"{case.name} ended with status {run.status}")
    outcome = _outcome(server, run, clock.seconds_per_step)
    counter.done(f"{outcome.seconds_per_step:.3f} s per step")
    return outcome


def _outcome(server: ComfyServer, run: Run, seconds_per_step: float) -> Outcome:
    latent = safetensors.torch.load(server.view(run.outputs[LATENT]["latents"][0]))["latent_tensor"].float()
    pictures = [opened(server.view(image)) for image in run.outputs[PICTURE]["images"]]
    shown: dict[str, Any] | None = run.outputs.get(REPORT)
    if shown is None:
        return Outcome(seconds_per_step, latent, pictures)
    return Outcome(seconds_per_step, latent, pictures, shown["text"][0], opened(server.view(shown["images"][0])))


def write(cases: list[Case], folder: Path) -> list[Path]:
    """Write the pictures as PNG files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "side_by_side.png", folder / "merge_map.png"]
    for path, sheet in zip(paths, (side_by_side(cases), merge_maps(cases)), strict=True):
        sheet.save(path, optimize=True)
    return paths


def compare(settings: Settings, folder: Path = OUTPUT) -> list[Case]:
    """Start the server, run all cases, print the table, write pictures into `folder`, and stop the server."""
    begin = time.monotonic()
    with demo_server() as server:
        cases = run_all(server, settings)
    print(f"\n{table(cases)}\n\n{explanation(cases, device_name())}\n", flush=True)
    for path in write(cases, folder):
        print(f"Wrote {path}", flush=True)
    say(f"Done in {time.monotonic() - begin:.0f} s; the server is stopped.")
    return cases


def place_workflows(user: Path) -> list[str]:
    """Copy the demo's workflows to the folder that the page lists, and return their names. `user`: the server's user
    folder."""
    target = user / "default" / "workflows"
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(WORKFLOWS.glob("*.json")):
        workflow = json.loads(source.read_text(encoding="utf-8"))
        for node in workflow["nodes"]:
            if node["type"] == "ToMADemoUNet" and not UNET.trained:
                node["widgets_values"][0] = "random"
        (target / source.name).write_text(json.dumps(workflow), encoding="utf-8")
    return sorted(path.stem for path in target.glob("*.json"))


def serve(base: Path | None = None, port: int | None = None, listen: str | None = None) -> None:
    """Leave ComfyUI's page open with the demo's workflows, until Ctrl-C.

    port: if None, 8199, or any free port if 8199 is in use. listen: see `demo_server`. Raises DemoError if the given
    port is in use.
    """
    if port is not None and free_port(port) != port:
        raise DemoError(f"port {port} is taken: choose another, or none and a free one is taken")
    with demo_server(base, port or _PORT, listen) as server:
        names = place_workflows(server.base / "user")
        server.set_setting("Comfy.TutorialCompleted", True)
        # Switch the new renderer of nodes on, because the classic renderer cannot compare images.
        server.set_setting("Comfy.VueNodes.Enabled", True)
        for kind in (UNET, DIT):
            if not kind.trained:
                say(f"    {kind.title}: random weights, its pictures are noise")
        first = f"{server.url}/?template={_FIRST}&source={WORKFLOWS.parent.name}" if UNET.trained else server.url
        say(f"\nOpen {first} in a browser on this machine. Under Workflows (key W): {', '.join(names)}.")
        if listen:
            say(f"From other machines: this machine's address, port {server.port}. ComfyUI has no password.")
        try:
            say("Press Ctrl-C here to stop the server.")
            while True:
                server.check_alive()
                time.sleep(1.0)
        except KeyboardInterrupt:
            say("\nStopping the server.")


class _Counter:
    """A progress line, which is overwritten on a terminal. Elsewhere one line is printed for each finished run."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._terminal:
            self._write(f"\r{self._title}: step {done}/{total}")

    def done(self, text: str) -> None:
        """Print the result of a finished run."""
        line = f"{self._title}: {text}"
        self._write(f"\r{line.ljust(shutil.get_terminal_size().columns - 1)}\n" if self._terminal else f"{line}\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def say(text: str) -> None:
    """Print one line to stderr, unbuffered. stdout holds only the results."""
    print(text, file=sys.stderr, flush=True)
