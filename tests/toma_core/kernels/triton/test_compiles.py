"""Test that every kernel compiles for three generations of NVIDIA GPUs. Triton's interpreter checks
neither types nor the limits of a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.toma_core.kernels.cases import printed

# Bytes of shared memory of a thread block on RTX 30 and 40 cards, the least of all supported cards.
SHARED = 99 * 1024

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from toma_core.kernels.triton import product, quant4, select

TYPES = {"source": "*i64", "dest_slots": "*i64", "expand": "*i64", "valid": "*i1", "used": "*i1",
            "destinations": "*i64", "R": "*fp32", "priority": "*fp32", "codes": "*u8",
            "sharpness": "fp32", "tie": "fp32", "least": "fp32", "wider": "fp32", "lowest": "fp32"}
TOKENS = ("low", "step", "x", "y", "reduced", "M", "back", "weights", "spread", "answer", "fresh", "cached", "out")

def compiled(kernel, dtype, capability, constants, warps, stages):
    signature, constant = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constant[(place,)] = "constexpr", constants[name]
        elif name in TOKENS:
            signature[name] = "*" + dtype
        else:
            signature[name] = TYPES.get(name, "i32")
    source = ASTSource(kernel, signature, constant)
    options = {"num_warps": warps, "num_stages": stages}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"kernel": kernel.__name__, "binary": len(done.asm["cubin"]), "shared": done.metadata.shared}

def every(dtype, capability):
    block = 16 if dtype == "fp32" else 64
    shared = {"HAS_VALID": True, "HAS_USED": True, "UPCAST": False}
    for slots, warps in ((64, 4), (128, 16)):
        sizes = {"S_PAD": slots, "K_PAD": slots, "BLOCK_C": block}
        constants = {**shared, **sizes, "SELECT": True, "HAS_PRIORITY": slots == 64}
        yield compiled(select._select_kernel, dtype, capability, constants, warps, 3)
    inner, channels = (32, 32) if dtype == "fp32" else (64, 128)
    blocks = {"STEPS": 4, "BLOCK_K": 64, "BLOCK_S": inner, "BLOCK_C": channels}
    yield compiled(product._merge_kernel, dtype, capability, {**shared, **blocks}, 8, 2)
    blocks = {"STEPS": 4, "BLOCK_K": inner, "BLOCK_S": 64, "BLOCK_C": channels, "BLOCK_F": product._BLOCK_F}
    for residual, rotated in ((True, False), (False, False), (False, True)):
        kind = {"RESIDUAL": residual, "REGRESSED": not residual, "ROTATED": rotated}
        yield compiled(product._unmerge_kernel, dtype, capability, {**shared, **blocks, **kind}, 8, 2)
    blocks = {"ROTATED": True, "BLOCK_D": product._BLOCK_D, "BLOCK_C": 128}
    yield compiled(product._change_kernel, dtype, capability, blocks, 4, 3)
    blocks = {"BITS": 4, "HALF": 32, "ROWS": quant4._ROWS}
    for kernel in (quant4._quantize_kernel, quant4._dequantize_kernel):
        yield compiled(kernel, dtype, capability, blocks, 4, 3)

print(json.dumps(list(every(sys.argv[1], int(sys.argv[2])))))
"""


@pytest.mark.parametrize(("capability", "dtype"), [(80, "fp32"), (86, "bf16"), (90, "fp16")])
def test_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    built = json.loads(printed(PROGRAM, tmp_path, dtype, str(capability)))
    assert len(built) == 9
    for kernel in built:
        assert kernel["binary"] > 0
        assert kernel["shared"] <= SHARED, kernel


WEIGHTS = """
import json, re
import torch
from testbed import offline
from toma_core.kernels.layout import joined, room
from toma_core.kernels.triton import TritonKernels, product
from toma_core.windows import make_budget, make_windows

windows = make_windows(26, 38, 8)
budget = make_budget(windows.counts, 0.5)
assert (windows.slots, budget.slots) == (56, 28)
x, y = (torch.zeros(2, tokens, 1280, dtype=torch.float16) for tokens in (windows.tokens, budget.total))

def narrow(kernel, call):
    call()
    (cache,) = [caches[0] for caches in kernel.device_caches.values()]
    ((key, binary),) = cache.items()
    cache.clear()
    return len(re.findall(r"ld[.]global[\\w.:]*[.][bu]16", binary.asm["ptx"]))

def close(like, *shape):
    return torch.zeros(shape, dtype=like.dtype)

found = []
with offline.stubbed():
    for make in (close, room):
        shape = len(windows.counts), budget.slots, windows.slots
        M, back = (joined([make(x, 1, *s)] * 2) for s in (shape, (shape[0], shape[2], shape[1])))
        kernels = TritonKernels()
        found.append([
            narrow(product._merge_kernel, lambda: kernels.merge(x, M, windows, budget)),
            narrow(product._unmerge_kernel, lambda: kernels.unmerge(y, back, windows, budget, y, x)),
        ])
print(json.dumps(found))
"""


def test_weights_are_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    """A window has 56 tokens and 28 destinations. Without padding (`close`), rows of 28 weights are not aligned to 16
    bytes, and the kernels read two bytes at a time."""
    close, apart = json.loads(printed(WEIGHTS, tmp_path))
    assert min(close) > 0
    assert apart == [0, 0]
