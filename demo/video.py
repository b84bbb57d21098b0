"""Draw clips with the tiny Wan through ComfyUI's own samplers: `python -m demo.video --weights wan.safetensors`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from .comfy_setup import prepare

if __name__ == "__main__":
    prepare()

import comfy.sample
import torch

from .checker import FIRST_TEST_SEED
from .clips import FRAMES, Clip, clip_from_seed, clip_tokens, render_clips, step_token
from .data import CLIP_SIZE
from .latents import LATENT_CHANNELS, UNSHUFFLE, model_to_clips
from .models import ClipLatents, load_wan
from .sampling import DEFAULTS, contact_sheet


def clip_conditioning(clips: list[Clip | None], steps: int | None = None) -> list[list[Any]]:
    """Return the CONDITIONING of a batch: clip i belongs to latent i, and None is the empty prompt.

    steps: the number of sampling steps, for a model that takes it as a token (see `clips.step_token`).
    """
    tokens = torch.stack([clip_tokens(clip) for clip in clips])
    if steps is not None:
        tokens = torch.cat([tokens, step_token(steps).expand(len(clips), 1, -1)], 1)
    return [[tokens, {}]]


def clip_noise(seeds: list[int]) -> torch.Tensor:
    """Draw noise for a batch of clips, one seed for each: (len(seeds), 16, FRAMES, h, w)."""
    shape = LATENT_CHANNELS, FRAMES, *[CLIP_SIZE // UNSHUFFLE] * 2
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def draw_clips(
    model: Any,
    clips: list[Clip],
    seeds: list[int],
    steps: int,
    cfg: float,
    model_steps: int | None = None,
    batch: int = 4,
    runs: int = 1,
) -> torch.Tensor:
    """Sample one latent per clip: (len(clips), 16, FRAMES, h, w), float32 on the CPU. `seeds` gives each clip its
    noise.

    model_steps: see `clip_conditioning`. runs: number of consecutive sampler runs that share the schedule. Wan 2.2
    needs two runs: one with its model for high noise, one with its model for low noise.
    """
    results, how = [], DEFAULTS["wan"]
    for start in range(0, len(clips), batch):
        part, part_seeds = clips[start : start + batch], seeds[start : start + batch]
        noise = clip_noise(part_seeds)
        drawn = torch.zeros_like(noise)
        positive = clip_conditioning(list(part), model_steps)
        negative = clip_conditioning([None] * len(part), model_steps)
        for run in range(runs):
            first = torch.zeros_like(drawn) if run else noise
            part_of_run = {"start_step": steps * run // runs, "last_step": steps * (run + 1) // runs}
            given = model, first, steps, cfg, how["sampler"], how["scheduler"], positive, negative, drawn
            drawn = comfy.sample.sample(*given, **part_of_run, disable_pbar=True, seed=part_seeds[0])
        results.append(drawn)
    return torch.cat(results).float().cpu()


def decode_clips(latent: torch.Tensor) -> torch.Tensor:
    """Map ComfyUI latents (B, 16, T, h, w) to clips (B, 3, T, 2h, 2w), about -1..1, not clamped."""
    return model_to_clips(ClipLatents().process_in(latent))


def main() -> None:
    """Write a sheet with pairs of rows: a sampled clip, and below it the same clip as `render_clips` draws it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=DEFAULTS["wan"]["cfg"])
    parser.add_argument("--model-steps", type=int, help="number of steps to pass to a model that takes it")
    parser.add_argument("--sheet", type=Path, required=True, help="where to write the PNG")
    args = parser.parse_args()
    clips = [clip_from_seed(FIRST_TEST_SEED + index) for index in range(args.count)]
    begin = time.monotonic()
    model = load_wan(str(args.weights))
    drawn = decode_clips(draw_clips(model, clips, list(range(args.count)), args.steps, args.cfg, args.model_steps))
    print(f"{args.count} clips, {args.steps} steps: {(time.monotonic() - begin) / args.count:.2f} s each")
    rows = torch.stack([drawn, render_clips(clips, CLIP_SIZE)], 1).movedim(3, 2).flatten(0, 2)
    large = torch.nn.functional.interpolate(rows, scale_factor=3.0)
    contact_sheet(large, FRAMES).save(args.sheet, optimize=True)


if __name__ == "__main__":
    main()
