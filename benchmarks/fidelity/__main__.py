"""Measure pictures of the tiny trained models with and without merging.

    python -m benchmarks.fidelity [--model dit deep] [--only "selector:" "preset:"]

All settings use the same scenes and noise. Rows that are already in the result folder are not computed again, so a run
can be stopped and resumed. Results are deterministic. PyTorch counts the FLOPs of matrix multiplications. The cost of a
setting is its FLOPs divided by the unmerged run's.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from scripts.cache import cache_dir

from .start import PICTURES, command, start


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = command(__doc__)
    parser.add_argument("--model", nargs="*", choices=PICTURES, default=["dit", "deep"])
    parser.add_argument("--only", nargs="*", default=[""], help="these settings, or whose name starts so")
    parser.add_argument("--images", type=int, default=22, help="pictures in a set (default 22)")
    parser.add_argument("--seeds", type=int, default=3, help="sets; spread is the deviation of their means (default 3)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=11)
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 needs a CPU with its instructions"
    )
    parser.add_argument("--weights", type=Path, default=Path("demo/weights"), help="folder with the trained weights")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity"))
    parser.add_argument("--list", action="store_true", help="print the names of the settings and stop")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Parse the command line, measure the missing rows, and write each row when it is measured."""
    args = _arguments(given)
    start(args)
    for kind in args.model:
        _measure(kind, args)


def _measure(kind: str, args: argparse.Namespace) -> None:
    from demo.sampling import defaults

    from .judge import Conditions, Judge
    from .settings import settings
    from .store import Store, fingerprint

    own = defaults(kind, args.steps)
    table = settings(kind)
    wanted = [name for name in table if name.startswith(tuple(args.only))]
    if args.list:
        print("\n".join(f"{kind}  {name}" for name in wanted))
        return
    weights = fingerprint([args.weights / f"{name}.safetensors" for name in (kind, "checker")])
    given = {name: getattr(args, name) for name in ("images", "seeds", "steps", "batch", "dtype")}
    conditions = Conditions(model=kind, weights=weights, size=own["size"], cfg=own["cfg"], **given)
    store = Store(conditions, args.out, cache_dir())
    missing = [name for name in ("unmerged", *wanted) if name not in store.read()["rows"]]
    begin = time.monotonic()
    if missing:
        judge = Judge(conditions, args.weights)
        print(f"{kind}: {len(missing)} to measure; {_minutes(time.monotonic() - begin)} to start", file=sys.stderr)
        begin = time.monotonic()
    for number, name in enumerate(missing, 1):
        row, pictures = judge.row(table.get(name))
        more = {"rounding": round(judge.rounding(), 5)} if name == "unmerged" and args.dtype != "fp32" else {}
        store.add(name, row, **more)
        store.keep_pictures(name, pictures)
        spent = time.monotonic() - begin
        left = spent / number * (len(missing) - number)
        print(
            f"{time.strftime('%H:%M:%S')} {kind} {number}/{len(missing)} {name}: error {row['error']:.4f}, "
            f"cost {row['cost']:.2f}, {spent / number:.0f} s a setting, {_minutes(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


if __name__ == "__main__":
    main()
