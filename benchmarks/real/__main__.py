"""Measure merged against unmerged pictures of your own checkpoint on your own ComfyUI.

    python -m benchmarks.real --checkpoint sd_xl_base_1.0.safetensors --prompts prompts.txt --ratio 0.25 0.5
    python -m benchmarks.real --flux flux1-dev.safetensors --prompts prompts.txt
    python -m benchmarks.real --graph my_graph_api.json --prompts prompts.txt

ComfyUI with ComfyUI-ToMA must be running. Pictures already in the output folder are not made again, so a run can be
stopped and resumed, and settings, prompts and seeds can be added. docs/real-checkpoints.md explains the results.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from . import BenchmarkError
from .graphs import (
    FLUX_SAMPLING,
    FluxFiles,
    SamplingRun,
    Setting,
    Template,
    checkpoint_graph,
    flux_graph,
    read_graph,
)

SAMPLING = [field.name for field in fields(SamplingRun)]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--server", default="http://127.0.0.1:8188", help="address of ComfyUI (default %(default)s)")
    source = found.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", help="an SDXL, SD1.5 or complete Flux checkpoint, as Load Checkpoint lists it")
    source.add_argument("--flux", metavar="UNET", help="a Flux model, as Load Diffusion Model lists it")
    source.add_argument("--graph", type=Path, metavar="FILE", help="your own graph, from File > Export (API)")
    found.add_argument("--clip-l", default="clip_l.safetensors", help="for --flux (default %(default)s)")
    found.add_argument("--t5", default="t5xxl_fp16.safetensors", help="for --flux (default %(default)s)")
    found.add_argument("--vae", default="ae.safetensors", help="for --flux (default %(default)s)")
    found.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="a text file with one prompt a line")
    found.add_argument("--negative", default="", help="negative prompt of all pictures")
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="for every prompt (default 1 2 3)")
    found.add_argument("--ratio", type=float, nargs="+", help="of the ToMA node (default: the node's)")
    found.add_argument("--preset", nargs="+", help="of the ToMA node (default: the node's)")
    found.add_argument(
        "--calibrate",
        nargs="*",
        metavar="NEAR",
        help="also measure what ToMA Calibrate finds: with the work of quality, balanced (default) or fast",
    )
    for name in ("width", "height", "steps"):
        found.add_argument(f"--{name}", type=int, help=_default(name))
    for name in ("cfg", "guidance"):
        found.add_argument(f"--{name}", type=float, help=_default(name))
    for name in ("sampler", "scheduler"):
        found.add_argument(f"--{name}", help=_default(name))
    found.add_argument("--output", metavar="ID", help="for --graph with several pictures: the node that counts")
    found.add_argument("--out", type=Path, default=Path("real-output"), help="folder (default %(default)s)")
    found.add_argument("--device", help="for the metrics, e.g. cpu or cuda (default: cuda where there is one)")
    return found


def _default(name: str) -> str:
    plain, flux = getattr(SamplingRun(), name), getattr(FLUX_SAMPLING, name)
    return f"default {plain}" + (f", for --flux {flux}" if flux != plain else "")


def template_of(args: argparse.Namespace) -> Template:
    """Return the graph of the options."""
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.graph is not None:
        if given:
            raise BenchmarkError(f"--{' --'.join(given)}: with --graph these are set in the graph itself")
        return Template(read_graph(args.graph), args.output)
    if args.output is not None:
        raise BenchmarkError("--output goes with --graph")
    if args.flux is not None:
        files = FluxFiles(args.flux, args.clip_l, args.t5, args.vae)
        return Template(flux_graph(files, replace(FLUX_SAMPLING, **given)))
    return Template(checkpoint_graph(args.checkpoint, replace(SamplingRun(), **given)))


def settings_of(args: argparse.Namespace, template: Template, widgets: dict[str, Any]) -> list[Setting]:
    """Return every ratio with every preset. An option that is not given defaults to the graph's value, else to the
    node's; so does a profile if neither is given.

    `widgets`: the inputs of the ToMA node from the server's description.
    """
    own_profile = template.own("profile") if args.ratio is args.preset is None else None
    if isinstance(own_profile, list):
        raise BenchmarkError(
            "the profile of the ToMA node comes from another node: paste its text there, or give --ratio or --preset"
        )
    profile = (own_profile or "").strip()
    given: dict[str, list[Any]] = {"ratio": args.ratio, "preset": args.preset}
    for name, values in given.items():
        if not values:
            own = template.own(name)
            described = widgets.get(name, [None])[-1]
            default = described.get("default") if isinstance(described, dict) else None
            given[name] = [default if own is None or isinstance(own, list) else own]
    pairs = itertools.product(dict.fromkeys(given["preset"]), dict.fromkeys(given["ratio"]))
    called = "the graph's profile" if profile else ""
    return [Setting(float(ratio), preset, profile, called) for preset, ratio in pairs]


def run(args: argparse.Namespace) -> Path:
    """Make missing pictures, measure, write, and return the page. Raises BenchmarkError."""
    from .calibrating import calibrate, near_of
    from .measure import results
    from .pictures import Folder, make_missing, plan, read_prompts
    from .report import aligned, notes, table, write
    from .server import Server

    prompts = read_prompts(args.prompts)
    template = template_of(args)
    server = Server(args.server)
    conditions = server.conditions()
    settings = settings_of(args, template, server.widgets(template.graph[template.merge]["class_type"]))
    folder = Folder(args.out)
    folder.prepare(conditions)
    seeds = list(dict.fromkeys(args.seeds))
    calibrated = []
    if args.calibrate is not None:
        nears = list(dict.fromkeys(map(near_of, args.calibrate or ["balanced"])))
        apart = next(number for number in itertools.count() if number not in seeds)  # a prompt that no measured picture
        # uses
        calibrated = calibrate(server, template, folder, nears, prompts[0], args.negative, apart)
        own = settings[0]  # without effect beside a profile, except that a ratio of 0 would switch ToMA off
        settings += [Setting(own.ratio or 0.5, own.preset, each.profile, each.name) for each in calibrated]
    jobs = plan(template, prompts, args.negative, seeds, settings)
    make_missing(server, template, folder, jobs)
    measured = results(folder, jobs, args.device or _device())
    asked = {"prompts": len(prompts), "seeds": args.seeds, "negative": args.negative}
    everything = {**conditions, **asked, "graph": template.graph}
    if calibrated:
        everything["calibrated"] = [asdict(each) for each in calibrated]
        measured.notes += [f"{each.name} ({each.file}): {' '.join(each.said.splitlines())}" for each in calibrated]
    print(f"\n{aligned(table(measured.summaries))}\n")
    print("\n".join(f"- {note}" for note in notes(measured, everything)))
    page = write(folder, measured, everything)
    print(f"\nWrote {page}, results.json, summary.csv and pairs.csv beside it.", flush=True)
    return page


def _device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return 0 if done, 1 after an error, which is printed, and 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        run(args)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        from_here = "numpy and Pillow compare the pictures: pip install numpy pillow"
        print(f"error: {error}. {from_here}, or use ComfyUI's own Python", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nStopped. Run the same command again to go on; {args.out} keeps what is done.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
