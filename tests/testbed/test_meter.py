import pytest
import torch

from testbed.meter import Meter


def test_a_product_is_counted() -> None:
    meter = Meter()
    a, b = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    with meter:
        c = a @ b
        c.view(15)
        c + 1
    assert (meter.cost.flops, meter.cost.launches) == (2 * 3 * 4 * 5, 2)
    assert meter.cost.bytes == 4 * (12 + 20 + 15) + 4 * (15 + 15)


@pytest.mark.parametrize(("skip", "shape"), [(False, (2, 6, 8)), (True, (2, 4, 6, 2))])
def test_attention_is_one_operation(skip: bool, shape: tuple[int, ...]) -> None:
    meter = Meter()
    q = torch.empty(shape, device="meta")
    k = torch.empty(2, 4, 3, 2, device="meta") if skip else torch.empty(2, 3, 8, device="meta")
    assert meter.attention(None, q, k, k, 4, skip_reshape=skip).shape == (2, 6, 8)
    assert meter.cost.flops == 4 * 2 * 6 * 3 * 8
    assert meter.cost.operations == {"attention": 1}
