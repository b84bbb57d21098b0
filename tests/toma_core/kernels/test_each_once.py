"""Test each kernel once, on small windows. The tests in the folder `triton` cover kernels at many sizes."""

from typing import Any

import torch

from tests.toma_core.kernels.cases import Case
from tests.toma_core.kernels.triton import test_product, test_quant4, test_select

RAGGED = Case(5, 7, 4, 0.5, 40, torch.float16, batch=2)


def test_search_and_weights(kernels: Any) -> None:
    test_select.test_select_and_weigh(RAGGED, kernels)


def test_merge_unmerge_and_restore(kernels: Any) -> None:
    test_product.test_merge_unmerge_and_restore(RAGGED, kernels)


def test_four_bits(kernels: Any) -> None:
    test_quant4.test_there_and_back(torch.float16, 96, 1.0, kernels)
