"""Train the tiny models: `python -m demo.train dit|unet|wan [--steps N] [--minutes M] [--resume] [--seed S]`.

Every step seeds its random numbers with (seed, step), so a resumed run equals an uninterrupted one. Most early steps
use scenes at half the size, or crops with their positions. Half-size scenes and crops have a quarter of a full
picture's tokens. Most late steps use full pictures of 128 x 128.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .comfy_setup import prepare

if __name__ == "__main__":
    prepare()

import comfy.model_management
import torch
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import models
from .compact import load_weights
from .data import KINDS, Batch, Batches, Plan
from .objectives import FewStepsObjective, FlowObjective, FluxCall, VelocityObjective, WanCall
from .sampling import DEFAULTS

# Convolutions, which make up half of the UNet, need a lower learning rate than the matrices.
SHARE_OF_RATE = {"dit": 1.0, "unet": 0.25, "wan": 1.0}
NEW = {"dit": models.new_dit, "unet": models.new_unet, "wan": models.new_wan}  # functions that make a fresh network


def _optimisers(network: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks, and AdamW for all other parameters.

    For the DiT, Muon reached the same loss with about two thirds of the pictures that AdamW alone needed.
    """
    inside = {name for name, p in network.named_parameters() if p.ndim == 2 and "block" in name}
    matrices = [p for name, p in network.named_parameters() if name in inside]
    rest = [p for name, p in network.named_parameters() if name not in inside]
    return [
        torch.optim.Muon([{"params": matrices, "share": 1.0}], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": rest, "share": SHARE_OF_RATE[plan.kind]}], betas=(0.9, 0.99), weight_decay=0.0),
    ]


class Trainer:
    """The network, its moving average and its optimisers, and the deterministic step that updates them."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        compiled: bool = False,
        config: dict[str, Any] | None = None,
        teacher: Path | None = None,
    ):
        """teacher: weights of a DiT or Wan that is distilled to few steps without guidance, or weights of the shallow
        UNet whose predictions the deep UNet learns."""
        self.plan = plan
        self.device = device
        self.config = config
        if config is None and plan.kind == "dit":
            config = self.config = models.dit_config(plan.width, plan.blocks, plan.token)
        self.network = NEW[plan.kind](plan.seed, config=config).to(device).train().requires_grad_(True)
        self.forward = torch.compile(self.network, dynamic=False) if compiled else self.network
        self.objective = self._objective(teacher, compiled)
        self.average = {name: value.detach().clone() for name, value in self.network.named_parameters()}
        self.optimisers = _optimisers(self.network, plan)
        self.step = 0
        self.seen: dict[str, int] = {}

    def _objective(self, teacher: Path | None, compiled: bool) -> FlowObjective | FewStepsObjective | VelocityObjective:
        network: Any = None
        if teacher is not None:
            config = None if self.plan.kind == "unet" else self.config  # the teacher of the deep UNet is shallow
            network = NEW[self.plan.kind](config=config).to(self.device).eval().requires_grad_(False)
            network.load_state_dict({name: value.float() for name, value in load_weights(teacher).items()})
            network = torch.compile(network, dynamic=False) if compiled else network
        if self.plan.kind == "unet":
            return VelocityObjective(network)
        call = WanCall() if self.plan.kind == "wan" else FluxCall()
        cfg = DEFAULTS[self.plan.kind]["cfg"]
        return FlowObjective(call) if network is None else FewStepsObjective(network, cfg, call)

    def train_step(self, batch: Batch) -> float:
        """Do one optimiser step on the batch of `self.step` and return its loss."""
        batch = batch.to(self.device)
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = self.plan.lr_at(self.step) * group["share"]
        # On a CPU, compute attention by plain products. With fused attention the backward pass is slower, and a step
        # takes a third longer.
        plain = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else nullcontext()
        # Do not cache casts. Otherwise weights that were cast without gradients, while the model makes its own targets,
        # would be reused where gradients are needed.
        with plain, torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            loss = self.objective.loss(self.forward, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.seen[batch.sort] = self.seen.get(batch.sort, 0) + batch.clean.shape[0]
        keep = min(self.plan.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            parameters = dict(self.network.named_parameters())
            torch._foreach_lerp_(list(self.average.values()), [parameters[name] for name in self.average], 1 - keep)
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write a checkpoint to resume from, atomically."""
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "seen": self.seen,
            "network": self.network.state_dict(),
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Resume from a file that `save` wrote. If the plan now has another number of steps, the cool-down of the
        learning rate moves."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["plan"]["kind"] != self.plan.kind or state["plan"]["seed"] != self.plan.seed:
            raise ValueError(
                f"{path} belongs to another run: kind {state['plan']['kind']}, seed {state['plan']['seed']}"
            )
        self.network.load_state_dict(state["network"])
        for optimiser, stored in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(stored)
        self.average = {name: value.to(self.device) for name, value in state["average"].items()}
        self.step, self.seen = state["step"], state["seen"]

    def begin_with(self, path: Path) -> None:
        """Start from weights that `export` wrote, at step 0 and with fresh optimisers."""
        weights = {name: value.to(self.device, torch.float32) for name, value in load_weights(path).items()}
        self.network.load_state_dict(weights)
        self.average = {name: value.detach().clone() for name, value in self.network.named_parameters()}

    def export(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the averaged weights as safetensors, for ComfyUI's loader or `load_unet`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {name: value.to("cpu", dtype).contiguous() for name, value in self.average.items()}
        save_file(weights, path, metadata={"step": str(self.step), **{k: str(v) for k, v in asdict(self.plan).items()}})


def run(trainer: Trainer, checkpoint: Path, minutes: float, every: float = 120.0, workers: int = 0) -> bool:
    """Train to the plan's end, a time limit or SIGTERM/SIGINT, and save every `every` seconds. Return whether the
    plan's end was reached."""
    stop = False

    def ask_to_stop(*_: Any) -> None:
        nonlocal stop
        stop = True

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, ask_to_stop)
    begin = saved = shown = time.monotonic()
    losses: dict[str, list[float]] = {}
    count, last_step = 0, trainer.step
    batches = Batches(trainer.plan).from_step(trainer.step, workers)
    while trainer.step < trainer.plan.steps and not stop and time.monotonic() - begin < minutes * 60:
        batch = next(batches)
        loss = trainer.train_step(batch)
        if not math.isfinite(loss):
            raise RuntimeError(f"loss is {loss} at step {trainer.step}; the last checkpoint is in {checkpoint}")
        losses.setdefault(batch.sort, []).append(loss)
        count += batch.clean.shape[0]
        now = time.monotonic()
        if now - shown > 20:
            speed = (trainer.step - last_step) / (now - shown)
            left = (trainer.plan.steps - trainer.step) / speed / 60
            means = [f"{name} {sum(values) / len(values):.4f}" for name, values in sorted(losses.items())]
            print(
                f"{time.strftime('%H:%M:%S')} step {trainer.step}/{trainer.plan.steps}  loss {'  '.join(means)}  "
                f"{count / (now - shown):.1f} img/s  lr {trainer.plan.lr_at(trainer.step):.1e}  ETA {left:.0f} min",
                flush=True,
            )
            shown, last_step, count, losses = now, trainer.step, 0, {}
        if now - saved > every:
            trainer.save(checkpoint)
            saved = now
    trainer.save(checkpoint)
    return trainer.step >= trainer.plan.steps


def plan_of(args: argparse.Namespace) -> Plan:
    names = ("kind", "steps", "seed", "lr", "warmup", "cooldown", "crop_batch", "full_batch", "width", "token", "ema")
    plan = Plan(**{name: getattr(args, name) for name in names}, blocks=tuple(args.blocks))
    shares = (0.0, 1.0) if args.full_only else args.shares
    return plan if shares is None else replace(plan, early_shares=tuple(shares), late_shares=tuple(shares))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=8000, help="length of the run, over which the rate falls")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long, with a checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=Plan.lr)
    parser.add_argument("--width", type=int, default=Plan.width, help="of the DiT")
    parser.add_argument("--blocks", type=int, nargs=2, default=Plan.blocks, help="double and single blocks of the DiT")
    parser.add_argument("--deep", action="store_true", help="the UNet with SDXL's depths")
    parser.add_argument("--token", type=int, default=Plan.token, help="side of the DiT's tokens in pixels, 2 or 4")
    parser.add_argument("--warmup", type=int, default=Plan.warmup, help="steps until the rate is reached")
    parser.add_argument("--shares", type=float, nargs=2, help="shares of steps with half-size scenes and full pictures")
    parser.add_argument("--crop-batch", type=int, default=Plan.crop_batch)
    parser.add_argument("--full-batch", type=int, default=Plan.full_batch)
    parser.add_argument("--full-only", action="store_true", help="full pictures only, to continue with --init")
    parser.add_argument("--cooldown", type=float, default=Plan.cooldown, help="share of the steps in which lr falls")
    parser.add_argument("--ema", type=float, default=Plan.ema, help="of the moving average that is exported")
    parser.add_argument("--init", type=Path, help="exported weights to begin with, where there is no checkpoint")
    parser.add_argument(
        "--teacher",
        type=Path,
        help="a trained DiT or Wan, to distil it to 4 and 8 steps without guidance; for the deep UNet, the shallow one "
        "whose predictions it learns",
    )
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    parser.add_argument("--compile", action="store_true", help="torch.compile: about 1.5x faster after a few minutes")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for torch's own choice")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw scenes ahead, for a GPU")
    parser.add_argument("--checkpoints", type=Path, default=Path("demo/checkpoints"), help="folder for --resume")
    parser.add_argument("--export", type=Path, default=None, help="where to write the weights at the end")
    args = parser.parse_args(given)
    if args.teacher and args.kind == "unet" and not args.deep:
        parser.error("--teacher is for the DiT, the Wan and, with --deep, for the UNet")
    if args.deep and args.kind != "unet":
        parser.error("--deep is of the UNet")
    return args


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    comfy.model_management.in_training = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = plan_of(args)
    trainer = Trainer(plan, device, args.compile, models.DEEP_UNET_CONFIG if args.deep else None, teacher=args.teacher)
    name = args.kind + "-deep" * args.deep + "-few" * bool(args.teacher and not args.deep)
    checkpoint = args.checkpoints / f"{name}.pt"
    if args.resume and checkpoint.exists():
        trainer.restore(checkpoint)
    elif args.init or (args.teacher and args.kind != "unet"):
        trainer.begin_with(args.init or args.teacher)
    size = sum(p.numel() for p in trainer.network.parameters())
    print(
        f"{args.kind}: {size / 1e6:.2f} M parameters on {device}, from step {trainer.step}, process {os.getpid()}",
        flush=True,
    )
    finished = run(trainer, checkpoint, args.minutes, workers=args.workers)
    if args.export:
        trainer.export(args.export)
    print(f"{'finished' if finished else 'stopped'} at step {trainer.step}, seen {trainer.seen}", flush=True)


if __name__ == "__main__":
    main()
