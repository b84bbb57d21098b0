"""Run one of two processes that sample pictures together, with torch.distributed's gloo on the loopback device.

`python rank.py RANK FOLDER` writes {case: result} into FOLDER/RANK.json. The processes connect through FOLDER/store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from scripts.comfy_pack import pack_module, use_comfyui
from testbed import models

SIZE = 2
EVERYTHING = {"min_tokens": 4}
# A picture has 144 tokens, a text has 6. With two references of the picture's size, each process has 219 of 438 tokens,
# more than the 150 tokens of picture and text.
SIDE, TEXT = 24, 6


def picture(model: Any, references: int = 0, text: int = TEXT, width: int = SIDE, steps: int = 2) -> Tensor:
    """Sample a latent. references: number of reference images, which have the latent's size."""
    g = torch.Generator().manual_seed(9)
    latents = [torch.randn(1, 16, SIDE, width, generator=g) for _ in range(references)]
    options: dict[str, Any] = {"reference_latents": latents} if latents else {}
    prompts = {name: models.conditioning(model, text, i, **options) for i, name in enumerate(("positive", "negative"))}
    return models.sample(model, SIDE, width, steps=steps, **prompts)


# (id of a model, options of a picture) -> the model and its picture without ToMA. The model is stored so that its id
# stays unique.
unmerged: dict[tuple[Any, ...], tuple[Any, Tensor]] = {}


def without_toma(model: Any, **options: Any) -> Tensor:
    key = (id(model), *sorted(options.items()))
    if key not in unmerged:
        unmerged[key] = model, picture(model, **options)
    return unmerged[key][1]


def tried(model: Any, alone: Any, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Compare a model's pictures with and without ToMA while all processes sample together. alone: the same model, but
    sampling in this process only."""
    run = pack_module("nodes.adapters.patch_model")
    config = pack_module("toma_core.config").ToMAConfig(**{**EVERYTHING, **settings})
    merged = run.apply_toma(model, config)
    plain, result = without_toma(model, **options), picture(merged, **options)
    stats = pack_module("nodes.adapters.attachment").last_stats(merged)
    theirs = [torch.empty_like(result) for _ in range(SIZE)]
    dist.all_gather(theirs, result.contiguous())
    on_one = without_toma(alone, **options)
    unchanged = torch.equal(result, plain)
    return {
        "off from one process": float((plain - on_one).norm() / on_one.norm()),
        "as without ToMA": unchanged,
        "as ToMA on one process": not unchanged
        and torch.equal(result, picture(run.apply_toma(alone, config), **options)),
        "the same on all": all(torch.equal(other, result) for other in theirs),
        "merged": len(stats.merged_blocks),
        "unmerged": {reason.id.value: len(parts) for reason, parts in stats.unmerged.items()},
    }


def sharded(model: Any) -> Any:
    """Return the model with each block's weights sharded over the processes (FSDP)."""
    from torch.distributed.fsdp import fully_shard

    kinds = {"BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock"}
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    for block in [m for m in model.model.diffusion_model.modules() if type(m).__name__ in kinds]:
        fully_shard(block, mesh=mesh)
    return model


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    from compatibility.parallel import Shares, Together, by_condition

    group, built = Together(), {"flux": models.flux(), "unet": models.unet()}
    flux, found = built["flux"], {}
    for way, rejoin in (("raylight", True), ("xdit", False)):
        shared = partial(tried, Shares(group, rejoin).on(flux), flux)
        for n in (0, 1, 2):
            found[f"tokens-{way}-{n}-references"] = partial(shared, {}, references=n)
        # With 132 tokens of a picture and 7 of text, two processes cannot get equal shares.
        found[f"tokens-{way}-odd"] = partial(shared, {}, text=7, width=22)
        found[f"tokens-{way}-module"] = partial(shared, {"granularity": "module"}, references=2)
        cached = {"full_step_interval": 2}
        found[f"tokens-{way}-detail"] = partial(shared, cached, references=2, steps=3)
    for name, model in built.items():
        shared = partial(tried, by_condition(group, model), model)
        for granularity in ("stack", "module"):
            found[f"conditions-{name}-{granularity}"] = partial(shared, {"granularity": granularity})
        found[f"pictures-{name}"] = partial(tried, model, model, {})
        found[f"weights-{name}"] = lambda name=name, model=model: tried(sharded(getattr(models, name)()), model, {})
    return found


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    use_comfyui(cpu=True)
    torch.set_num_threads(1)
    # Use the loopback device, because the name of the machine may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # The processes connect through a file, because another program might take a port.
    store, limit = f"file://{folder / 'store'}", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=limit)
    (folder / f"{rank}.json").write_text(json.dumps({name: case() for name, case in cases().items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
