"""A small network that reads the attributes of a scene back from its picture: `python -m demo.checker`.

The checker judges whether generated pictures follow their prompt, and its features give a Frechet distance.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from .scenes import ATTRIBUTES, CANVAS, Scene, render_batch, scene_from_seed, visible

FEATURES = 64
WEIGHTS = Path(__file__).parent / "weights" / "checker.safetensors"
# The checker's own seeds. The training of the other models uses 1,000,000 and up, and contact sheets use low seeds.
FIRST_TRAINING_SEED = 2_000_000_000
FIRST_TEST_SEED = 500_000


class Checker(nn.Module):
    """Convolutional classifier with one head per attribute. Pictures must be 128 x 128."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 48, 96, 128)
        stages: list[nn.Module] = []
        for narrow, wide in itertools.pairwise(widths):
            # The early convolutions, where small objects cover several cells, are dense. Those with many channels are
            # grouped.
            groups = 1 if wide < 64 else wide // 8
            stages.append(
                nn.Sequential(
                    nn.Conv2d(narrow, wide, 3, stride=2, padding=1),
                    nn.GroupNorm(8, wide),
                    nn.SiLU(),
                    nn.Conv2d(wide, wide, 3, padding=1, groups=groups),
                    nn.GroupNorm(8, wide),
                    nn.SiLU(),
                )
            )
        self.stages = nn.ModuleList(stages)
        self.squeeze = nn.Conv2d(widths[-1], 48, 1)
        # The last stage, squeezed to 48 channels, keeps positions. The pooled middle stages distinguish kinds of small
        # objects.
        self.hidden = nn.Linear(48 * 8 * 8 + widths[2] + widths[3], 256)
        self.bottleneck = nn.Linear(256, FEATURES)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, len(values)) for values in ATTRIBUTES.values())

    def _trunk(self, image: torch.Tensor) -> torch.Tensor:
        if image.ndim != 4 or image.shape[1:] != (3, 128, 128):
            raise ValueError(f"expected pictures of shape (B, 3, 128, 128), not {tuple(image.shape)}")
        maps = [image]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        where = F.silu(self.squeeze(maps[-1])).flatten(1)
        what = [m.amax(dim=(2, 3)) for m in maps[2:4]]
        return F.silu(self.hidden(torch.cat([where, *what], 1)))

    def features(self, image: torch.Tensor) -> torch.Tensor:
        """Compute the features (B, 64) that all heads read from pictures (B, 3, 128, 128) in -1..1."""
        return self.bottleneck(self._trunk(image))

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Map pictures (B, 3, 128, 128) in -1..1 to logits (B, values) per attribute, in the order of `ATTRIBUTES`."""
        features = F.silu(self.features(image))
        return [head(features) for head in self.heads]


def load_checker(path: Path | str = WEIGHTS) -> Checker:
    """Load the trained checker, on the CPU in evaluation mode. Raises FileNotFoundError if `path` does not exist,
    ValueError if the file is damaged."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} is missing: train it with `python -m demo.checker --export {path}`")
    checker = Checker()
    try:
        checker.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}): get it again, or train it again") from error
    return checker.eval().requires_grad_(False)


def for_checker(image: torch.Tensor) -> torch.Tensor:
    """Resize square pictures (B, 3, H, W) for the checker: (B, 3, 128, 128) in -1..1."""
    image, side = image.clamp(-1, 1), image.shape[-1]
    if side == CANVAS:
        return image
    return F.interpolate(image, CANVAS, mode="area") if side > CANVAS else F.interpolate(image, CANVAS, mode="bilinear")


def correct(checker: Checker, image: torch.Tensor, scenes: list[Scene]) -> torch.Tensor:
    """Mark the attributes that the checker reads back correctly: pictures (B, 3, 128, 128) -> float32 (B,
    len(ATTRIBUTES)).

    1 is correct and 0 is wrong. NaN stands for an attribute that is not visible in the scene.
    """
    with torch.no_grad():
        guess = torch.stack([logits.argmax(dim=1) for logits in checker(image.clamp(-1, 1))], dim=1)
    truth = torch.tensor([scene.values() for scene in scenes])
    seen = torch.tensor([visible(scene) for scene in scenes])
    return torch.where(seen, (guess.cpu() == truth).float(), torch.nan)


def accuracy(checker: Checker, image: torch.Tensor, scenes: list[Scene]) -> dict[str, float]:
    """Return the share of correct attributes (0..1) by name, and over all visible attributes under "all"."""
    marks = correct(checker, image, scenes)
    result = {name: float(marks[:, index].nanmean()) for index, name in enumerate(ATTRIBUTES)}
    return {"all": float(marks.nanmean()), **result}


def frechet_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Fit Gaussians to two sets of features, (n, d) and (m, d), and compute their Frechet distance in float64, as in
    FID."""
    if a.shape[0] < 2 or b.shape[0] < 2:
        raise ValueError("a Frechet distance needs at least two pictures on each side")
    a, b = a.double(), b.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # tr((A B)^1/2) is computed from the symmetric matrix root(A) B root(A), whose eigenvalues are real.
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)


def train(checker: Checker, steps: int, batch: int = 32, lr: float = 2e-3, minutes: float = 60.0) -> int:
    """Train on fresh scenes, print progress, and return the number of steps done. The result is deterministic unless
    time runs out."""
    optimiser = torch.optim.AdamW(checker.parameters(), lr=lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    begin = shown = time.monotonic()
    checker.train()
    for step in range(steps):
        first = FIRST_TRAINING_SEED + step * batch
        scenes = [scene_from_seed(first + index) for index in range(batch)]
        image = render_batch(scenes)
        # Add a little noise, as in generated pictures. Otherwise the checker would judge their noise, not their
        # content.
        strength = 0.15 * torch.rand(batch, 1, 1, 1, generator=generator)
        image = (image + strength * torch.randn(image.shape, generator=generator)).clamp(-1, 1)
        truth = torch.tensor([scene.values() for scene in scenes])
        seen = torch.tensor([visible(scene) for scene in scenes])
        truth = torch.where(seen, truth, -100)
        with torch.autocast("cpu", torch.bfloat16):
            answers = checker(image)
        losses = torch.stack(
            [
                F.cross_entropy(logits.float(), truth[:, index], label_smoothing=0.02)
                for index, logits in enumerate(answers)
            ]
        )
        # Heads with a larger loss get more weight, such as the one that reads the kind of small objects from a few
        # pixels.
        weights = losses.detach() / losses.detach().mean() + 0.2
        loss = (weights * losses).mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        now = time.monotonic()
        if now - shown > 15 or step == steps - 1:
            speed = (step + 1) * batch / (now - begin)
            mean, worst = losses.mean().item(), losses.max().item()
            left = (steps - step - 1) * batch / speed / 60
            print(
                f"step {step + 1}/{steps}  loss {mean:.4f} (worst {worst:.3f})  {speed:.0f} img/s  ETA {left:.1f} min",
                flush=True,
            )
            shown = now
        if now - begin > minutes * 60:
            return step + 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--export", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    checker = Checker()
    done = train(checker, args.steps, minutes=args.minutes)
    args.export.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half() for name, value in checker.state_dict().items()}, args.export, {"steps": str(done)})
    scenes = [scene_from_seed(FIRST_TEST_SEED + index) for index in range(512)]
    for name, share in accuracy(load_checker(args.export), render_batch(scenes), scenes).items():
        print(f"{name:14s} {share:.3f}")


if __name__ == "__main__":
    main()
