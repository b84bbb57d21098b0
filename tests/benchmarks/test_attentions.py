"""Each attention that ComfyUI offers has a row that it computes itself, alone and on merged tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attentions, bench, variants
from testbed import fullsize
from testbed.fullsize import Shape

CPU = torch.device("cpu")


@pytest.fixture
def offered(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace ComfyUI's table of names by a copy for the test."""
    import comfy.ldm.modules.attention as own

    monkeypatch.setattr(own, "REGISTERED_ATTENTION_FUNCTIONS", dict(own.REGISTERED_ATTENTION_FUNCTIONS))
    table: dict[str, Any] = own.REGISTERED_ATTENTION_FUNCTIONS
    return table


def test_what_is_offered_computes_and_what_refuses_is_left_out(offered: dict[str, Any]) -> None:
    """FlashAttention on a CPU: ComfyUI's function exists, but falls back to PyTorch's attention."""
    import comfy.ldm.modules.attention as own

    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel for this card")

    offered |= {"flash": own.attention_flash, "broken": broken}
    found, notes = attentions.here(CPU, torch.float32, 64)
    assert {v.name for v in found} >= {f"{name} attention" for name in ("pytorch", "sub_quad", "split")}
    assert sorted(note for note in notes if not note.startswith("xformers")) == [
        "broken attention: left out, RuntimeError: no kernel for this card",
        "flash attention: left out, PyTorch's computes in its place (float32, heads of 64)",
    ]


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_rows_alone_and_with_merging(offered: dict[str, Any], kind: str) -> None:
    lengths: set[int] = set()
    pytorch = offered["pytorch"]

    def mine(q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        lengths.add(q.shape[2] if kwargs.get("skip_reshape") else q.shape[1])
        return pytorch(q, k, v, heads, *args, **kwargs)

    offered.clear()
    offered["pytorch"] = mine
    patcher = fullsize.patcher(kind, torch.float32, CPU, tiny=True)
    shape, merged = Shape(kind, 128, 128, 1, tiny=True), variants.toma("stack", ratio=0.5, **variants.TINY)
    rows, notes = attentions.measure(patcher, shape, merged, torch.float32, CPU, 1, 60)
    assert notes == []
    assert bench.red(rows) == []
    names = ["unpatched", "ToMA stack", "pytorch attention", "pytorch attention + ToMA stack"]
    assert [row.variant for row in rows] == names
    assert {row.section for row in rows} == {"attention"}
    assert rows[0].error == rows[2].error == 0
    assert rows[3].error == rows[1].error != 0
    assert len(lengths - {attentions._TRIAL}) > (2 if kind == "sdxl" else 1), "unmerged and merged"
