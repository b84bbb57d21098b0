"""Every kernel compiles for every generation of GPU, without one: the interpreter checks no types and no limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory of a block on RTX 30 and 40 cards; the others have more.
SHARED = 99 * 1024

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from toma_core.kernels.triton import agreement, product, select

TYPES = {"source": "*i64", "picks": "*i64", "expand": "*i64", "valid": "*i1", "used": "*i1",
            "destinations": "*i64", "sums": "*fp32", "scratch": "*fp32", "scale": "fp32", "tie": "fp32",
            "trust": "fp32"}
TOKENS = ("x", "y", "reduced", "kept", "M", "back", "weights", "out")

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
    for on_chip, slots, warps in ((True, 64, 4), (True, 128, 16), (False, 256, 8)):
        constants = {**shared, "SELECT": True, "S_PAD": slots, "K_PAD": slots // 2, "BLOCK_C": block}
        if on_chip:
            yield compiled(select._on_chip_kernel, dtype, capability, constants, warps, 3)
        else:
            yield compiled(select._tiled_kernel, dtype, capability, {**constants, "TILE": select._TILE}, warps, 1)
    inner, channels = (32, 32) if dtype == "fp32" else (64, 128)
    blocks = {"STEPS": 4, "BLOCK_K": 64, "BLOCK_S": inner, "BLOCK_C": channels}
    yield compiled(product._merge_kernel, dtype, capability, {**shared, **blocks}, 8, 2)
    blocks = {"STEPS": 4, "BLOCK_K": inner, "BLOCK_S": 64, "BLOCK_C": channels, "RESIDUAL": True,
              "BLOCK_P": 256}
    for reuse in (False, True):
        yield compiled(product._unmerge_kernel, dtype, capability, {**shared, **blocks, "REUSE": reuse}, 8, 2)
    blocks = {"BLOCK_D": 16, "BLOCK_C": 128}
    yield compiled(agreement._agreement_kernel, dtype, capability, blocks, 4, 3)

print(json.dumps(list(every(sys.argv[1], int(sys.argv[2])))))
"""


@pytest.mark.parametrize(("capability", "dtype"), [(80, "fp32"), (86, "bf16"), (90, "fp16")])
def test_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia.compiler")
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(program), dtype, str(capability)],
        env=environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)
    assert len(built) == 7
    for kernel in built:
        assert kernel["binary"] > 0
        assert kernel["shared"] <= SHARED, kernel
