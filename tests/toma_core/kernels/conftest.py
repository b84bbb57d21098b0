"""Provide fixtures for kernels, which run on a CUDA device if there is one, otherwise in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toma_core.kernels.cases import DEVICE

pytest.importorskip("triton", reason="Triton has no build for this system")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh memory with NaN and out-of-range indices, so that tests fail if a kernel leaves a value unwritten."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.dtype is torch.uint8:
            return tensor.fill_(255)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**40))

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Run on one thread, because the interpreter's arrays are too small to gain from several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels() -> Any:
    from toma_core.kernels.triton import INTERPRETED, TritonKernels

    if DEVICE == "cpu" and not INTERPRETED:
        pytest.fail("Triton was imported before TRITON_INTERPRET was set: tests/conftest.py must come first")
    return TritonKernels()
