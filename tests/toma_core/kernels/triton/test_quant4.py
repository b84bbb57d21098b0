"""Test the kernels that quantise to four bits, and that kernels and PyTorch dequantise each other's results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toma_core.kernels.cases import DEVICE, views
from toma_core.quant4 import Int4Tensor, quantize


def tokens(channels: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
    x = size * torch.randn(2, 70, channels, generator=torch.Generator().manual_seed(channels))
    return x.clamp(-6e4, 6e4).to(DEVICE, dtype)


def near(found: Tensor, x: Tensor, packed: Int4Tensor) -> bool:
    """Return whether `found` differs from x by at most half a quantisation step, plus rounding to the dtype."""
    steps = packed.step.float().repeat_interleave(x.shape[-1] // packed.step.shape[-1], -1)
    rounding = 8 * torch.finfo(x.dtype).eps * float(x.float().abs().max())
    return bool(((found.float() - x.float()).abs() <= 0.51 * steps + rounding).all())


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
@pytest.mark.parametrize("channels", [16, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back(dtype: torch.dtype, channels: int, size: float, kernels: Any) -> None:
    x = tokens(channels, dtype, size)
    ours, theirs = kernels.quantize(x), quantize(x)
    assert isinstance(ours, Int4Tensor)
    assert isinstance(theirs, Int4Tensor)
    assert [(part.shape, part.dtype) for part in ours] == [(part.shape, part.dtype) for part in theirs]
    for packed in (ours, theirs):
        assert near(kernels.dequantize(packed), x, packed)
        assert near(packed.dequantize(), x, packed)
    for part, expected in zip(ours.chunk(2), kernels.dequantize(ours).chunk(2), strict=True):
        assert torch.equal(kernels.dequantize(part), expected)
    for strided in views(x):
        assert all(map(torch.equal, kernels.quantize(strided), ours))


def test_channels_in_no_groups_are_copied(kernels: Any) -> None:
    x = tokens(20, torch.float32)
    copy = kernels.quantize(x)
    assert torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()
