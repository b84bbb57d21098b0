"""Build the UNet with SDXL's depths from the shallow UNet: `python -m demo.deepen unet.safetensors deep.safetensors`.

The shallow UNet is not in the repository. Train it first: `python -m demo.train unet --export unet.safetensors`.

Each trained block is repeated n times in a row, with its outputs divided by n. The stack then integrates the same
update in smaller steps (as in Chang et al. 2018, "Multi-level Residual Networks from Dynamical Systems View"), and
pictures hardly change. `demo.train unet --deep --init deep.safetensors --teacher unet.safetensors` reduces the
difference that remains between the pictures of the two UNets.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .comfy_setup import prepare

if __name__ == "__main__":
    prepare()

from safetensors.torch import save_file
from torch import Tensor

from . import models
from .compact import load_weights

_BLOCK = re.compile(r"(.*\.transformer_blocks)\.(\d+)\.(.*)")
# The layers whose outputs are added to the residual stream.
_OUTPUTS = ("to_out.0.weight", "to_out.0.bias", "ff.net.2.weight", "ff.net.2.bias")


def depths(names: Iterable[str]) -> dict[str, int]:
    """Return the number of transformer blocks of each stack."""
    found: dict[str, int] = {}
    for match in filter(None, map(_BLOCK.match, names)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def deepened(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return weights for a UNet with parameters `names`. Each stack of this UNet has as many blocks as the same stack
    of `weights`, or more."""
    names = list(names)
    before, after, found = depths(weights), depths(names), {}
    for name in names:
        match = _BLOCK.match(name)
        if match is None:
            found[name] = weights[name].float().clone()
            continue
        stack, new = match[1], int(match[2])
        old = [block * before[stack] // after[stack] for block in range(after[stack])]
        value = weights[f"{stack}.{old[new]}.{match[3]}"].float()
        found[name] = value / old.count(old[new]) if match[3].endswith(_OUTPUTS) else value.clone()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    names = models.new_unet(config=models.DEEP_UNET_CONFIG).state_dict()
    save_file(deepened(load_weights(args.source), names), args.target)


if __name__ == "__main__":
    main()
