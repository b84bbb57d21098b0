"""Measure pictures of the tiny trained models with and without merging.

    python -m benchmarks.fidelity [--model dit unet] [--only "selector:" "preset:"] [--images 64] [--seeds 3]

Same scenes and noise for every setting. Rows already in the result folder are not computed again, so a run can be
stopped and taken up. The table, the CSV and the plots are written anew each time from all rows; they hold no times of
this machine: cost is the share of matrix-multiplication work left, counted by PyTorch, and the same on every run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.comfy_pack import load_pack, use_comfyui

COLUMNS = ("distance", "spread", "psnr", "ssim", "detail", "seams", "frechet", "attributes", "cost")


def _fingerprint(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Judge:
    """One model, its scenes, and the unmerged pictures everything is compared with."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        from demo.checker import FIRST_TEST_SEED, load_checker
        from demo.sampling import DEFAULTS, load
        from demo.scenes import scene_from_seed

        self.kind, self.args = kind, args
        self.model = load(kind, args.weights / f"{kind}.safetensors")
        self.checker = load_checker(args.weights / "checker.safetensors")
        self.options = {**DEFAULTS[kind], "steps": args.steps, "size": args.size}
        self.sets = []
        for group in range(args.seeds):
            indices = [group * args.images + i for i in range(args.images)]
            self.sets.append(([scene_from_seed(FIRST_TEST_SEED + i) for i in indices], indices))
        self.plain = [self._generate(self.model, *chosen) for chosen in self.sets]
        self.plain_flops = self._flops(self.model)

    def _generate(self, model: Any, scenes: list[Any], seeds: list[int]) -> torch.Tensor:
        from demo.sampling import generate

        return generate(model, scenes, seeds, batch=self.args.batch, **self.options)

    def _flops(self, model: Any) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        scenes, seeds = self.sets[0]
        with FlopCounterMode(display=False) as counter:
            self._generate(model, scenes[:1], seeds[:1])
        return counter.get_total_flops()

    def row(self, patch: Any | None) -> dict[str, float]:
        """Every column for one setting; None is the unmerged model itself."""
        from demo.checker import accuracy, frechet_distance
        from demo.latents import decode
        from demo.scenes import render_batch

        from .metrics import measure

        model = self.model if patch is None else patch(self.model)
        groups, images, scenes = [], [], []
        for (chosen, seeds), plain in zip(self.sets, self.plain, strict=True):
            latent = plain if patch is None else self._generate(model, chosen, seeds)
            figures = measure(decode(latent), latent, decode(plain), plain, self.args.window)
            groups.append({name: float(value.mean()) for name, value in figures.items()})
            images.append(decode(latent))
            scenes += chosen
        image = torch.cat(images)
        row = {name: sum(g[name] for g in groups) / len(groups) for name in groups[0]}
        distances = torch.tensor([g["distance"] for g in groups])
        row["spread"] = float(distances.std()) if len(groups) > 1 else 0.0
        real = self.checker.features(render_batch(scenes))
        row["frechet"] = frechet_distance(self.checker.features(image.clamp(-1, 1)), real)
        row["attributes"] = accuracy(self.checker, image, scenes)["all"]
        row["cost"] = self._flops(model) / self.plain_flops
        return row


def main() -> None:
    """Parse, measure what is missing, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=["dit", "unet"], default=["dit", "unet"])
    parser.add_argument("--only", nargs="*", default=[], help="settings whose name starts with one of these")
    parser.add_argument("--images", type=int, default=64, help="pictures in a set (default 64)")
    parser.add_argument("--seeds", type=int, default=3, help="sets; spread is the deviation of their means (default 3)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="picture side in pixels (default 128)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--window", type=int, default=8, help="window side for the seam figure, in tokens")
    parser.add_argument("--weights", type=Path, default=Path("demo/weights"), help="folder with the trained weights")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity"))
    args = parser.parse_args()

    use_comfyui()
    load_pack()
    from .report import write
    from .settings import settings

    args.out.mkdir(parents=True, exist_ok=True)
    table = {"unmerged": None, **settings()}
    wanted = [name for name in table if name == "unmerged" or not args.only or name.startswith(tuple(args.only))]
    for kind in args.model:
        files = [args.weights / f"{name}.safetensors" for name in (kind, "checker")]
        conditions = {
            "model": kind,
            "weights": _fingerprint(files),
            **{k: getattr(args, k) for k in ("images", "seeds", "steps", "size", "window")},
        }
        file = args.out / f"{kind}-{args.steps}steps-{args.size}px-{args.images}x{args.seeds}.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        rows = stored.get("rows", {}) if stored.get("conditions") == conditions else {}
        missing = [name for name in wanted if name not in rows]
        if missing:
            judge = Judge(kind, args)
        for number, name in enumerate(missing, 1):
            start = time.monotonic()
            rows[name] = judge.row(table[name])
            file.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
            print(
                f"{kind} {number}/{len(missing)} {name}: distance {rows[name]['distance']:.4f}, "
                f"cost {rows[name]['cost']:.2f}, {time.monotonic() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        write(file, conditions, rows, COLUMNS)


if __name__ == "__main__":
    main()
