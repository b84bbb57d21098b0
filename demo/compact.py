"""Quantize weights to 8 bits, for a light repository: `python -m demo.compact trained.safetensors weights.safetensors`.

Every large matrix is stored as int8 from -127 to 127, with one scale per row. All other weights are stored as float16.
The rounding is part of the model: merged and unmerged pictures use the same rounded weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

_LARGE = 4096
_SCALE = ".row_scale"


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize the large weights of a state dict to 8 bits."""
    found = {}
    for name, value in weights.items():
        if value.ndim < 2 or value.numel() < _LARGE:
            found[name] = value.half().contiguous()
            continue
        rows = value.float().flatten(1)
        scale = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
        found[name] = (rows / scale).round().to(torch.int8).reshape(value.shape).contiguous()
        found[name + _SCALE] = scale.flatten()
    return found


def unpacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `packed` up to rounding, in float32. Weights that are not packed are returned unchanged."""
    found = {}
    for name, value in weights.items():
        if name.endswith(_SCALE):
            continue
        scale = weights.get(name + _SCALE)
        found[name] = value if scale is None else (value.flatten(1) * scale[:, None]).reshape(value.shape)
    return found


def is_packed(path: Path | str) -> bool:
    """Return whether a safetensors file holds the result of `packed`."""
    with safe_open(path, "pt") as file:
        return any(name.endswith(_SCALE) for name in file.keys())  # noqa: SIM118 - no mapping


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Load the weights in a safetensors file, packed or not, on the CPU. Raises FileNotFoundError."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no {path}: GitHub's ZIP leaves weights out, a full `git clone --depth 1` has them")
    return unpacked(load_file(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    with safe_open(args.source, "pt") as file:
        metadata = file.metadata()
    save_file(packed(load_weights(args.source)), args.target, metadata=metadata)
    print(f"{args.target}: {args.target.stat().st_size / 1e6:.1f} MB, was {args.source.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
