"""Test that kernels compile for three generations of GPUs. Triton's interpreter checks neither types nor limits."""

import json
from pathlib import Path

import pytest

from tests.toma_core.kernels.cases import printed

SHARED = 99 * 1024  # bytes of a thread block on RTX 30 and 40 cards, the least of all supported cards

# Windows have different sizes. Their tokens and destinations fill a kernel's largest tiles.
PROGRAM = """
import json, sys
import torch
from testbed import offline
from toma_core.kernels.triton import TritonKernels, product, quant4, select
from toma_core.windows import make_budget, make_windows

dtype, offline.TARGET = getattr(torch, sys.argv[1]), ("cuda", int(sys.argv[2]), 32)
KERNELS = (select._select_kernel, product._merge_kernel, product._unmerge_kernel, product._change_kernel,
           quant4._quantize_kernel, quant4._dequantize_kernel)
with offline.stubbed():
    kernels = TritonKernels()
    for grid, size in (((15, 24), 8), ((21, 33), 11)):
        windows = make_windows(*grid, size)
        layout = windows, make_budget(windows.counts, 0.4)
        x = torch.zeros(2, windows.tokens, 1280, dtype=dtype)
        priority = torch.ones(2, windows.tokens) if size == 8 else None
        _, M, back = kernels.weigh(x, None, *layout, 1.0, priority)
    y = kernels.merge(x, M, *layout)
    kernels.unmerge(y, back, *layout, y, x)
    D, R = y.shape[1], torch.zeros(1, windows.tokens, 1, 64, 2, 2)
    kernels.change(y, x, torch.zeros(1, D, dtype=torch.int64), R[:, :D])
    answer, spread = (torch.zeros(2, *shape, dtype=dtype) for shape in ((129, 1280), (windows.tokens, 129)))
    for rotation in (None, R):
        kernels.unmerge(y, back, *layout, None, x, spread, answer, rotation)
    kernels.dequantize(kernels.quantize(x))
print(json.dumps([(b.name, len(b.asm["cubin"]), b.metadata.shared) for b in offline.binaries(*KERNELS)]))
"""


@pytest.mark.parametrize(("capability", "dtype"), [(80, "float32"), (86, "bfloat16"), (90, "float16")])
def test_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    built = json.loads(printed(PROGRAM, tmp_path, dtype, str(capability)))
    assert len(built) == 9
    for name, size, shared in built:
        assert size > 0, name
        assert shared <= SHARED, name


WEIGHTS = """
import json, re
import torch
from testbed import offline
from toma_core.kernels.layout import joined, room
from toma_core.kernels.triton import TritonKernels, product
from toma_core.windows import make_budget, make_windows

windows = make_windows(26, 38, 8)
layout = windows, make_budget(windows.counts, 0.5)
x, y = (torch.zeros(2, tokens, 1280, dtype=torch.float16) for tokens in (windows.tokens, layout[1].total))

def close(like, *shape):
    return torch.zeros(shape, dtype=like.dtype)

found, shape = [], (1, len(windows.counts), 28, 56)
with offline.stubbed():
    for make in (close, room):
        M, back = (joined([make(x, *s)] * 2) for s in (shape, (*shape[:2], 56, 28)))
        kernels = TritonKernels()
        kernels.merge(x, M, *layout)
        kernels.unmerge(y, back, *layout, y, x)
        for binary in offline.binaries(product._merge_kernel, product._unmerge_kernel):
            found.append(len(re.findall(r"ld[.]global[\\w.:]*[.][bu]16", binary.asm["ptx"])))
        for kernel in (product._merge_kernel, product._unmerge_kernel):
            kernel.device_caches.clear()
print(json.dumps(found))
"""


def test_weights_are_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Rows of 28 weights without padding (`close`) are not aligned to 16 bytes, and are read two bytes at a time."""
    *close, merge, unmerge = json.loads(printed(WEIGHTS, tmp_path))
    assert min(close) > 0
    assert len(close) == 2
    assert (merge, unmerge) == (0, 0)
