"""Test that quantising tensors to four bits per number has a small error, and that the estimate of memory is exact."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loop import loop
from tests.toma_core.plans import randn
from toma_core.quant4 import Int4Tensor, int4_bytes, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed_of(x: torch.Tensor) -> Int4Tensor:
    packed = quantize(x)
    assert isinstance(packed, Int4Tensor)
    return packed


@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    channels=st.sampled_from([16, 48, 64, 96, 128, 3072]),
    size=st.sampled_from([1e-6, 1e-2, 1.0, 300.0, 3e4]),
)
def test_no_number_is_off_by_more_than_half_a_step(seed: int, dtype: torch.dtype, channels: int, size: float) -> None:
    x = (size * randn(seed, 2, 3, channels)).clamp(-6e4, 6e4).to(dtype)
    packed = packed_of(x)
    found = packed.dequantize()
    assert (found.shape, found.dtype) == (packed.shape, packed.dtype) == (x.shape, x.dtype)
    half = packed.step.double().repeat_interleave(channels // packed.step.shape[-1], -1) / 2
    rounding = 8 * torch.finfo(dtype).eps * x.double().abs().amax() + 8 * torch.finfo(dtype).tiny
    assert ((found.double() - x.double()).abs() <= half * 1.01 + rounding).all()
    assert all(map(torch.equal, (part.dequantize() for part in packed.chunk(2)), found.chunk(2)))


@loop("dtype", DTYPES)
def test_what_is_all_alike_comes_back_in_the_bytes_reckoned_with(dtype: torch.dtype) -> None:
    for value in (0.0, -3.25, 1e4):
        x = torch.full((1, 4, 256), value, dtype=dtype)
        packed = packed_of(x)
        torch.testing.assert_close(packed.dequantize(), x, rtol=1e-3, atol=1e-4)
        assert packed.nbytes == int4_bytes(x.numel(), dtype.itemsize) < 0.3 * x.nbytes


def test_the_full_range_of_half_precision() -> None:
    x = torch.tensor([-65504.0, 65504.0] * 32).half()[None, None]
    found = quantize(x).dequantize()
    assert found.isfinite().all()
    torch.testing.assert_close(found, x, rtol=0.05, atol=0)


def test_channels_in_no_groups_are_copied() -> None:
    x = torch.randn(1, 4, 20)
    copy = quantize(x)
    assert isinstance(copy, torch.Tensor)
    assert torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()


@loop("dtype", DTYPES)
def test_numbers_far_from_zero_beside_their_spread(dtype: torch.dtype) -> None:
    """Two codes share a byte. A value that is rounded beyond the largest code must not change the other code."""
    for far in (50, 300):
        x = (far + randn(0, 1, 500, 128)).to(dtype)
        packed = packed_of(x)
        step = packed.step.double().repeat_interleave(64, -1)
        rounding = 2 * far * torch.finfo(dtype).eps
        assert ((packed.dequantize().double() - x.double()).abs() <= step + rounding).all()


def test_one_replaces_another() -> None:
    x, other = torch.randn(4, 5, 64), torch.randn(2, 5, 64)
    packed, instead = packed_of(x), packed_of(other)
    packed.chunk(2)[1].copy_(instead)
    assert torch.equal(packed.dequantize()[2:], instead.dequantize())
    assert torch.equal(packed.dequantize()[:2], packed_of(x).chunk(2)[0].dequantize())
