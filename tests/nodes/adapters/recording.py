"""Provide a stand-in for the recorder of memory allocations that ComfyUI releases after 0.33 use on NVIDIA cards.

ComfyUI records the allocations of each block in an evaluation, and repeats their addresses in the next evaluation. So
every recorded evaluation must make the same allocations. The allocations of a block must be free when the next block
ends. A recording that an error leaves open must be ended before another recording begins. The stand-in counts
violations of these rules. For the stand-in, a block ends when the model calls the next block.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By kind of model: module, class and method that ComfyUI records. Each method calls the blocks. The method of MiniMax
# H3 also calls wrappers of DIFFUSION_MODEL.
RECORDED = {
    "h3": ("comfy.ldm.minimax.model", "MiniMaxH3Model", "forward"),
    "ltx_av": ("comfy.ldm.lightricks.av_model", "LTXAVModel", "_process_transformer_blocks"),
    "qwen_image21": ("comfy.ldm.qwen_image21.model", "QwenImage21Transformer2DModel", "_forward"),
}


@dataclass(eq=False)
class Recording(TorchDispatchMode):
    """Records the evaluations of one thread."""

    evaluations: list[list[list[int]]] = field(default_factory=list)  # bytes of each allocation, by block
    ended: list[bool] = field(default_factory=list)  # by evaluation
    enabled: list[bool] = field(default_factory=list)  # whether ComfyUI's compiler was on, by evaluation of the model
    survivors: int = 0  # number of allocations of a block that were not free when the next block had ended
    left_open: int = 0  # number of evaluations that began while the previous recording was open
    is_open: bool = False
    thread: int = field(default_factory=threading.get_ident)
    _made: list[list[StorageWeakRef]] = field(default_factory=list)  # allocations of the last two blocks

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_open:
            given, made = (
                {
                    t.untyped_storage()._cdata: t.untyped_storage()
                    for t in tree_leaves(each)
                    if isinstance(t, torch.Tensor)
                }
                for each in ((args, kwargs), out)
            )
            for storage in (made[pointer] for pointer in made.keys() - given.keys()):
                self.evaluations[-1][-1].append(storage.nbytes())
                self._made[-1].append(StorageWeakRef(storage))
        return out

    def begin(self) -> None:
        self.left_open += self.is_open
        self.is_open, self._made = True, [[]]
        self.evaluations.append([[]])
        self.ended.append(False)

    def next_block(self) -> None:
        previous, made = self._made[:-1], self._made[-1]
        self.survivors += sum(not storage.expired() for each in previous for storage in each)
        # Skip allocations before the first block. They are inputs of all blocks, so they may stay.
        self._made = [made if len(self.evaluations[-1]) > 1 else [], []]
        self.evaluations[-1].append([])

    def end(self) -> None:
        if self.is_open:
            self.next_block()
            self.ended[-1] = True
        self.is_open = False

    def abort(self) -> None:
        self.is_open = False

    def block(self) -> None:
        if self.is_open and threading.get_ident() == self.thread:
            self.next_block()


def blocks_of(network: Any) -> Any:
    return getattr(network, "transformer_blocks", None) or network.blocks


@contextmanager
def recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """Record evaluations of models of a kind. Evaluations with ComfyUI's compiler switched off are not recorded."""
    from comfy.cli_args import args

    prefetch, (module, name, method) = pytest.importorskip("comfy.model_prefetch"), RECORDED[kind]
    recording, owner = Recording(), getattr(import_module(module), name)
    evaluate, cleanup = getattr(owner, method), prefetch.cleanup_prefetch_queues

    def evaluated(self: Any, *args_: Any, **kwargs: Any) -> Any:
        recording.enabled.append(not args.disable_comfy_compiler)
        if args.disable_comfy_compiler or threading.get_ident() != recording.thread:
            return evaluate(self, *args_, **kwargs)
        recording.begin()
        block = type(blocks_of(self)[0])
        call = block.__call__
        with monkeypatch.context() as patch:
            patch.setattr(block, "__call__", lambda each, *a, **k: (recording.block(), call(each, *a, **k))[1])
            out = evaluate(self, *args_, **kwargs)
        recording.end()
        return out

    def cleaned() -> None:
        recording.abort()
        cleanup()

    with monkeypatch.context() as patch, recording:
        patch.setattr(args, "disable_comfy_compiler", False, raising=False)
        patch.setattr(owner, method, evaluated)
        patch.setattr(prefetch, "cleanup_prefetch_queues", cleaned)
        patch.setattr(prefetch, "cleanup_malloc_graph", recording.abort, raising=False)
        yield recording
