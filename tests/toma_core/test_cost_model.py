"""Test which sizes Auto (`min_tokens` = 0) merges on several cards."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loop import loop
from toma_core import cost_model
from toma_core.config import Granularity
from toma_core.cost_model import Block, Card, card_of, too_little
from toma_core.reasons import Reason

B200 = Card("NVIDIA B200", (10, 0), 148, 1.965e9)
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9)
RTX_5090 = Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407e9)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9)
RTX_3060 = Card("NVIDIA GeForce RTX 3060", (8, 6), 28, 1.777e9)
CARDS = (B200, H100, A100, RTX_5090, RTX_4090, RTX_3060)
WORK = Reason.TOO_LITTLE_WORK()

STACK = Granularity.STACK
cards = st.sampled_from([None, *CARDS])
# The costs of blocks as the model families declare them.
UNET_BLOCK = Block(18, 20, (1, 2, 6))
FLUX_DOUBLE, FLUX_SINGLE = Block(12, 75, (2, 4, 4), beside=256), Block(12, 31, (2, 5, 5), beside=256)
Z_IMAGE, SD3 = Block(12, 54, (1, 5, 5), beside=32), Block(12, 70, (1, 2, 2), beside=77)
added = st.tuples(st.integers(1, 3), st.integers(4, 20)).map(lambda few: (few[0], few[1], few[0] + 2))
blocks = st.builds(Block, st.floats(11, 18), st.integers(20, 280), added, st.sampled_from([0, 32, 256, 512]))
granularities = st.sampled_from(list(Granularity))
sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 20_000),
        "images": st.integers(1, 8),
        "width": st.sampled_from([64, 320, 640, 1280, 3072]),
        "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        "card": cards,
        "block": blocks,
    }
)


@loop("dtype", [torch.float16, torch.bfloat16], ids=str)
@loop(
    ("card", "side", "width", "block", "merged"),
    [
        pytest.param(H100, 64, 640, UNET_BLOCK, True, id="H100, SDXL 1024, finest"),
        pytest.param(H100, 32, 1280, UNET_BLOCK, True, id="H100, SDXL 1024, coarser"),
        pytest.param(H100, 32, 640, UNET_BLOCK, False, id="H100, SDXL 512, finest"),
        pytest.param(H100, 16, 1280, UNET_BLOCK, False, id="H100, SDXL 512, coarser"),
        pytest.param(H100, 64, 320, UNET_BLOCK, False, id="H100, SD1.5 512, finest"),
        pytest.param(H100, 64, 3072, FLUX_DOUBLE, True, id="H100, Flux 1024, double"),
        pytest.param(H100, 64, 3072, FLUX_SINGLE, True, id="H100, Flux 1024, single"),
        pytest.param(H100, 16, 3072, FLUX_DOUBLE, False, id="H100, Flux 256, double"),
        pytest.param(H100, 32, 3840, Z_IMAGE, True, id="H100, Z-Image 512"),
        pytest.param(H100, 16, 3840, Z_IMAGE, False, id="H100, Z-Image 256"),
        pytest.param(B200, 32, 2432, SD3, False, id="B200, SD3.5 512"),
        pytest.param(B200, 128, 640, UNET_BLOCK, True, id="B200, SDXL 2048, finest"),
        pytest.param(B200, 32, 1280, UNET_BLOCK, False, id="B200, SDXL 1024, coarser"),
        pytest.param(RTX_4090, 32, 1280, UNET_BLOCK, True, id="4090, SDXL 1024, coarser"),
        pytest.param(RTX_4090, 16, 1280, UNET_BLOCK, True, id="4090, SDXL 512, coarser"),
        pytest.param(RTX_4090, 32, 320, UNET_BLOCK, False, id="4090, SD1.5 256, finest"),
        pytest.param(RTX_4090, 16, 3072, FLUX_SINGLE, True, id="4090, Flux 256, single"),
        pytest.param(RTX_3060, 16, 1280, UNET_BLOCK, True, id="3060, SDXL 512, coarser"),
        pytest.param(RTX_3060, 64, 320, UNET_BLOCK, True, id="3060, SD1.5 512, finest"),
        pytest.param(RTX_3060, 32, 128, UNET_BLOCK, False, id="3060, a tiny model"),
    ],
)
def test_everyday_sizes(card: Card, side: int, width: int, block: Block, merged: bool, dtype: torch.dtype) -> None:
    assert too_little(side**2, 1, width, dtype, card, block, STACK) == (None if merged else WORK)


@loop(
    ("tokens", "images", "width", "dtype", "granularity", "merged"),
    [
        # SDXL at 512 x 512: one image in fp16 is not merged. Eight images, or one in fp32, are merged.
        (256, 1, 1280, torch.float16, STACK, False),
        (256, 8, 1280, torch.float16, STACK, True),
        (256, 1, 1280, torch.float32, STACK, True),
        # SD1.5 at 584 x 584 is merged stack by stack, not block by block.
        (73**2, 1, 320, torch.float16, STACK, True),
        (73**2, 1, 320, torch.float16, Granularity.BLOCK, False),
        # SDXL is merged at every shape that it was trained on. 1536 x 640 has the fewest tokens.
        (96 * 40, 1, 640, torch.float16, STACK, True),
        (48 * 20, 1, 1280, torch.float16, STACK, True),
    ],
)
def test_sizes_on_an_h100(
    tokens: int, images: int, width: int, dtype: torch.dtype, granularity: Granularity, merged: bool
) -> None:
    assert too_little(tokens, images, width, dtype, H100, UNET_BLOCK, granularity) == (None if merged else WORK)


@loop(
    ("card", "peak"), [(B200, 2382), (H100, 1070), (A100, 312), (RTX_5090, 209.5), (RTX_4090, 165.2), (RTX_3060, 25.5)]
)
def test_rates_follow_the_peaks_in_data_sheets(card: Card, peak: float) -> None:
    """`peak` is the data sheet's TFLOP/s for half precision with fp32 sums, at the clock that the driver reports."""
    assert card.rate(torch.bfloat16) == card.rate(torch.float16)
    assert card.rate(torch.float16) / 1e12 == pytest.approx(cost_model.EFFICIENCY * peak, rel=0.01)
    assert card.rate(torch.float32) < card.rate(torch.float16)


def test_unlisted_cards() -> None:
    """Cards before generation 7.0 have no tensor cores. Cards newer than all known ones get the rate of the last known
    generation. GeForce cards with tensor cores have half the rate of other cards of their generation."""
    clock = 2 * cost_model.CLOCK * cost_model.EFFICIENCY
    for capability, each in (((6, 1), 256), ((7, 5), 1024), ((8, 7), 1024), ((10, 3), 8192), ((13, 0), 1024)):
        assert Card("Quadro", capability, 2).rate(torch.float16) == clock * each
        geforce = each if capability < (7, 0) else each / 2
        assert Card("NVIDIA GeForce X", capability, 2).rate(torch.float16) == clock * geforce


@given(sizes, granularities, st.integers(0, 5_000), st.integers(0, 8))
def test_more_work_is_never_merged_less(
    size: dict[str, Any], granularity: Granularity, more_tokens: int, more_images: int
) -> None:
    """A grid that Auto does not merge around stacks is not merged around blocks or modules either. Grids of fewer than
    256 tokens are never merged. On devices other than cards, all larger grids are merged."""
    reason, stack = too_little(**size, granularity=granularity), too_little(**size, granularity=STACK)
    larger = {**size, "tokens": size["tokens"] + more_tokens, "images": size["images"] + more_images}
    assert reason or not too_little(**larger, granularity=granularity)
    assert reason or not stack
    assert (reason == Reason.TOO_FEW_TOKENS(least=256)) == (size["tokens"] < 256)
    assert size["card"] is not None or size["tokens"] < 256 or reason is None


def test_other_devices_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch presents AMD cards as CUDA devices, but Auto cannot estimate their speed."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pytest.fail("it was asked"))
    for kind in ("cpu", "meta", "mps", "xpu", "privateuseone"):
        assert card_of.__wrapped__(torch.device(kind)) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert card_of.__wrapped__(torch.device("cuda", 0)) is None


@loop(
    ("clock", "hertz"),
    [({"clock_rate": 2_520_000}, 2.52e9), ({"clock_rate": 0}, cost_model.CLOCK), ({}, cost_model.CLOCK)],
)
def test_the_driver_is_asked_once_per_device(
    clock: dict[str, int], hertz: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device.index)
        return SimpleNamespace(name="NVIDIA X", major=8, minor=9, multi_processor_count=10 + device.index, **clock)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    card_of.cache_clear()
    found = [card_of(torch.device("cuda", index)) for index in (0, 1, 0, 1)]
    card_of.cache_clear()
    assert asked == [0, 1]
    assert found == [Card("NVIDIA X", (8, 9), processors, hertz) for processors in (10, 11, 10, 11)]
