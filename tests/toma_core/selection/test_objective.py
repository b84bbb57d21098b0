"""Test cosine similarity, and the facility location objective against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.selectors import facility_location
from tests.loop import loop
from tests.toma_core.plans import randn
from tests.toma_core.selection.reference import naive_value
from toma_core import selection
from toma_core.selection import cosine_similarity, in_parts, normalized


@loop("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cosines_are_computed_in_fp32(dtype: torch.dtype) -> None:
    x = (100 * torch.randn(3, 9, 40)).to(dtype)
    S = cosine_similarity(x)
    exact = x.double() / x.double().norm(dim=-1, keepdim=True)
    assert S.dtype == torch.float32
    torch.testing.assert_close(S.double(), exact @ exact.transpose(-1, -2), rtol=0, atol=1e-6)


def test_large_and_zero_tokens() -> None:
    """In fp16 the square of a feature of 256 or more would be infinite. Zero tokens are similar to nothing."""
    x = torch.full((1, 2, 64), 3e4, dtype=torch.float16)
    torch.testing.assert_close(cosine_similarity(x), torch.ones(1, 2, 2))
    x = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    assert normalized(x).tolist() == [[[0.0, 0.0], [pytest.approx(0.6), pytest.approx(0.8)]]]
    torch.testing.assert_close(cosine_similarity(x), torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]))


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(0, 3), st.data())
def test_value_is_that_of_the_loops(seed: int, slots: int, padding: int, data: st.DataObject) -> None:
    """The objective does not count padding tokens."""
    S = cosine_similarity(randn(seed, 2, slots + padding, 5))
    size = data.draw(st.integers(1, slots))
    dest_slots = [torch.randperm(slots, generator=torch.Generator().manual_seed(seed + w))[:size] for w in range(2)]
    values = facility_location(S, torch.stack(dest_slots), (torch.arange(slots + padding) < slots).expand(2, -1))
    for w in range(2):
        value = naive_value(S[w, :slots, :slots], dest_slots[w].tolist())
        assert values[w].item() == pytest.approx(value, rel=1e-5, abs=1e-5)


@loop("most", [1, 100, 10**9])
def test_windows_may_come_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`in_parts` splits the 7 windows of 2 images into parts of at most `most` elements, but of at least one window."""
    x, dest_slots = torch.randn(2, 7, 9, 5), torch.randint(9, (2, 7, 4))
    seen = []

    def noted(part: torch.Tensor, its_picks: torch.Tensor) -> torch.Tensor:
        seen.append(part.numel())
        return cosine_similarity(part, its_picks)

    monkeypatch.setattr(selection, "MAX_ELEMENTS", most)
    found = in_parts(noted, x, dest_slots)
    assert sum(seen) == x.numel()
    assert max(seen) <= max(most, 9 * 5)
    torch.testing.assert_close(found, cosine_similarity(x, dest_slots))
    everything = in_parts(cosine_similarity, x)
    torch.testing.assert_close(everything.gather(2, dest_slots[..., None].expand(-1, -1, -1, 9)), found)
