"""Test the share of new noise in a latent. Linear combinations of earlier latents and predictions have no new noise."""

import pytest
import torch
from torch import Tensor

from tests.toma_core.plans import randn
from toma_core.innovation import History

SHAPE = (1, 4, 16, 16)


def drawn(seed: int) -> Tensor:
    return randn(seed, *SHAPE)


def history() -> tuple[History, list[Tensor]]:
    found, tensors = History(), [drawn(seed) for seed in range(6)]
    for latent, picture in zip(tensors[::2], tensors[1::2], strict=True):
        found.note(latent, picture)
    return found, tensors


def new_in(found: History, latent: Tensor, sigma: float = 1.0) -> float:
    new = found.new_noise(latent, sigma)
    assert new is not None
    return float(new)


def test_a_combination_of_what_was_seen_is_not_new() -> None:
    found, tensors = history()
    assert new_in(found, torch.stack([(n - 2.5) * t for n, t in enumerate(tensors)]).sum(0)) < 1e-5


def test_its_share_of_the_noise_is_found() -> None:
    """As in inpainting, new noise in one corner of the latent counts as if it were everywhere."""
    found, (masked, *_) = history()
    for share in (0.1, 0.5, 1.0):
        assert new_in(found, (1 - share**2) ** 0.5 * masked + share * drawn(9)) == pytest.approx(share, rel=0.2)
    masked[..., :8, :8] = drawn(9)[..., :8, :8]
    assert new_in(found, masked) > 0.9


def test_predictions_that_hardly_differ_do_not_hide_it() -> None:
    """Late predictions differ by little more than rounding. Noise that is small beside the picture counts little."""
    found, picture = History(), drawn(1)
    for n in range(3):
        found.note(picture + 1e-7 * n, picture)
        assert new_in(found, picture + 1e-3 * drawn(2), 1e-3) < 0.03
    assert new_in(found, picture + 0.3 * drawn(2)) == pytest.approx(0.3, rel=0.2)


def test_without_anything_to_compare_with_it_is_unknown() -> None:
    """With `compared=False`, a history holds only the last predicted picture."""
    found, last = History(), History(compared=False)
    assert found.new_noise(drawn(1), 1.0) is None
    for seed in range(3):
        found.note(drawn(seed)[..., :8], drawn(seed + 10)[..., :8])
        last.note(drawn(seed), drawn(seed + 10))
    assert [each.new_noise(drawn(1), 1.0) for each in (found, last)] == [None, None]
    assert len(last._recent) == 1
    picture = last.prediction(SHAPE)
    assert picture is not None
    assert torch.equal(picture, drawn(12))


def test_nothing_is_read_from_the_device() -> None:
    found = History()
    latent = torch.empty(SHAPE, device="meta")
    for _ in range(3):
        found.note(latent, latent)
    new = found.new_noise(latent, 1.0)
    assert new is not None
    assert new.shape == ()
