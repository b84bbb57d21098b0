"""Properties of the card, its driver and ComfyUI's packages, stored with every result."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any

import torch

from benchmarks import bench
from scripts.comfy_pack import pack_module

_ADDS = 2000


def facts(device: torch.device) -> dict[str, Any]:
    """Return the properties by name; those of the card only if there is one."""
    import comfy.ldm.modules.attention as attention
    import comfy.quant_ops

    kitchen = getattr(comfy.quant_ops, "ck", None)
    backends = kitchen.list_backends() if kitchen is not None else {}
    values: dict[str, Any] = {
        "cpus": os.cpu_count(),
        # Triton builds its launcher with it; without one its kernels do not run.
        "C compiler": next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "none"),
        "attentions": " ".join(attention.REGISTERED_ATTENTION_FUNCTIONS),
        "comfy-kitchen": " ".join(name for name, of in backends.items() if of.get("available")),
        "host us of a small add": round(_small_add(device) * 1e6, 2),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        values |= {
            "capability": f"{card.major}.{card.minor}",
            "processors": card.multi_processor_count,
            "L2 MiB": card.L2_cache_size >> 20,
            "free GiB": round(torch.cuda.mem_get_info(device)[0] / 2**30, 1),
            "driver": _nvidia("driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"),
            "rate of the cost model, TFLOPs": _rate(device),
        }
    return values


def _small_add(device: torch.device) -> float:
    """Measure the host's seconds for a minimal launch."""
    small = torch.zeros(16, device=device)
    small.add_(1)
    bench.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_ADDS):
        small.add_(1)
    seconds = (time.perf_counter() - begin) / _ADDS
    bench.synchronize(device)
    return seconds


def _nvidia(query: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],  # noqa: S607
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout.strip().replace(", ", " / ")


def _rate(device: torch.device) -> float:
    """Return the rates in bf16 that Auto and the presets use."""
    card = pack_module("toma_core.cost_model").card_of(device)
    return round(float(card.rate(torch.bfloat16)) / 1e12, 1)
