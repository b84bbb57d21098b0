"""A simulated GPU: Triton compiles kernels for it and launches them, but no kernel runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TARGET = ("cuda", 90, 32)


class Launcher:
    """Stands in for the launcher that Triton compiles. It calls the launch hooks, and launches nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.arguments = len(source.signature)

    def __call__(self, *given: Any) -> None:
        assert len(given) == 9 + self.arguments
        metadata, enter, leave = given[6:9]
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)


class _Utils:
    """Answers Triton's questions about properties of the device and of binaries."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024


class Stub:
    """A driver of the simulated GPU."""

    launcher_cls, utils = Launcher, _Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(TARGET[1], 10)


@contextmanager
def stubbed(stub: Stub | None = None) -> Iterator[None]:
    """Inside the context, let Triton compile and launch without a GPU. Triton's interpreter must be off when Triton is
    first imported."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(stub or Stub())
    try:
        yield
    finally:
        driver.set_active(before)


def binaries(*kernels: Any) -> list[Any]:
    """Return the binaries that Triton has compiled of these kernels."""
    caches = [cache[0] for kernel in kernels for cache in kernel.device_caches.values()]
    return [binary for cache in caches for binary in cache.values()]
