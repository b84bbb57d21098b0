"""Compare merged with unmerged pictures of your own checkpoint on your own ComfyUI.

    python -m benchmarks.real --checkpoint sd_xl_base_1.0.safetensors --prompts prompts.txt --ratio 0.25 0.5
    python -m benchmarks.real --graph my_graph_api.json --prompts prompts.txt

ComfyUI with ComfyUI-ToMA must be running. Pictures that the output folder already has are not made again. So a run can
be stopped and resumed, and further settings, prompts and seeds can be added. docs/real-checkpoints.md explains the
results.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from . import BenchmarkError
from .graphs import Setting, Template, checkpoint_graph, read_graph
from .server import Server


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--server", default="http://127.0.0.1:8188", help="address of ComfyUI (default %(default)s)")
    source = found.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", help="an SDXL or SD1.5 checkpoint, as Load Checkpoint lists it")
    source.add_argument("--graph", type=Path, metavar="FILE", help="your own graph, from File > Export (API)")
    found.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="a text file with one prompt a line")
    found.add_argument("--negative", default="", help="negative prompt of all pictures")
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="for every prompt (default 1 2 3)")
    found.add_argument("--ratio", type=float, nargs="+", help="of the ToMA node (default: the node's)")
    found.add_argument("--preset", nargs="+", help="of the ToMA node (default: the node's)")
    for name, default in (("width", 1024), ("height", 1024), ("steps", 30)):
        found.add_argument(f"--{name}", type=int, default=default, help="for --checkpoint (default %(default)s)")
    found.add_argument("--cfg", type=float, default=7.0, help="for --checkpoint (default %(default)s)")
    found.add_argument("--output", metavar="ID", help="for --graph with several pictures: the node that counts")
    found.add_argument("--out", type=Path, default=Path("real-output"), help="folder (default %(default)s)")
    return found


def template_of(args: argparse.Namespace) -> Template:
    """Return the template of the user's graph, or of a graph for the user's checkpoint."""
    if args.graph is not None:
        return Template(read_graph(args.graph), args.output)
    return Template(checkpoint_graph(args.checkpoint, args.width, args.height, args.steps, args.cfg))


def settings_of(args: argparse.Namespace, template: Template, server: Server) -> list[Setting]:
    """Return every combination of ratio and preset. A ratio or preset that the options lack is read from the graph's
    ToMA node, or is the node's default. If the options have neither ratio nor preset, the profile in the graph is
    used."""
    profile = template.own("profile") if args.ratio is args.preset is None else None
    if isinstance(profile, list):
        raise BenchmarkError(
            "the profile of the ToMA node comes from another node: paste its text there, or give --ratio or --preset"
        )
    kind = template.graph[template.merge]["class_type"]
    given = {}
    for name in ("ratio", "preset"):
        own = template.own(name)
        default = server.default(kind, name) if own is None or isinstance(own, list) else own
        given[name] = list(dict.fromkeys(getattr(args, name) or [default]))
    pairs = itertools.product(given["preset"], given["ratio"])
    return [Setting(float(ratio), preset, (profile or "").strip()) for preset, ratio in pairs]


def run(args: argparse.Namespace) -> None:
    """Make the missing pictures, compare all pictures, and print and write the results. Raises BenchmarkError."""
    from .compare import loaded, measure, pairs_of, summarise
    from .pictures import Folder, make_missing, plan, read_prompts
    from .report import notes, table, write

    prompts = read_prompts(args.prompts)
    template = template_of(args)
    server = Server(args.server)
    conditions = server.conditions()
    settings = settings_of(args, template, server)
    folder = Folder(args.out)
    folder.prepare(conditions)
    jobs = plan(template, prompts, args.negative, list(dict.fromkeys(args.seeds)), settings)
    make_missing(server, template, folder, jobs)
    metrics, missing = loaded()
    pairs = pairs_of(folder, jobs)
    measure(pairs, metrics)
    summaries = summarise(pairs)
    said = [*notes(summaries, conditions), *missing]
    print("\n".join(f"| {' | '.join(row)} |" for row in table(summaries)))
    print("\n".join(f"- {note}" for note in said))
    page = write(folder, pairs, summaries, {**conditions, "graph": template.graph}, said)
    print(f"\nWrote {page}, and results.json beside it.", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 after success, 1 after an error, and 130 after Ctrl-C. Errors are printed."""
    args = parser().parse_args(argv)
    try:
        run(args)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"error: {error}. pip install numpy pillow, or use ComfyUI's own Python", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nStopped. Run the same command again to go on; {args.out} keeps what is done.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
