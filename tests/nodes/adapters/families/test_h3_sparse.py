"""Test MiniMax H3 with sparse attention, as in Fast-H3. In a part of the schedule, a node passes an attention function
to the blocks. ComfyUI's node does so only with 12,288 tokens or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from tests.loop import loop
from tests.nodes.adapters.families.test_h3 import sampled
from tests.nodes.adapters.helpers import balanced

Reason = pack_module("toma_core.reasons").Reason
STEPS, BLOCKS = 8, 4


@pytest.fixture
def sparse(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[int], list[int]]]:
    """sparse(start_percent, dense): return a model with sparse attention, and two lists that get the number of tokens
    of each sparse attention and of each block.

    The attention stands in for `BlockSparseAttention`, which came after ComfyUI 0.33. start_percent: share of the
    schedule at which sparse attention begins. dense: indices of blocks that are never sparse.
    """

    def patched(start_percent: float, dense: set[int]) -> tuple[Any, list[int], list[int]]:
        model, calls, lengths = model_of("h3").clone(), list[int](), list[int]()
        blocks, start = model.model.diffusion_model.blocks, model.get_model_object("model_sampling")
        owner, limit = type(blocks[0]), float(start.percent_to_sigma(start_percent))
        forward = owner.forward

        def newer(
            self: Any,
            x: Any,
            t_emb: Any,
            mod_segments: Any,
            rope_freqs: Any,
            transformer_options: Any = None,
            attention: Any = None,
        ) -> Any:
            lengths.append(len(x))
            with monkeypatch.context() as patch:
                if attention is not None:
                    patch.setattr(self.attn, "forward", attention)
                return forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options or {})

        def replaced(n: int, block: Any) -> Callable[..., Any]:
            attend = block.attn.forward

            def attention(h: Tensor, **rest: Any) -> Any:
                calls.append(len(h))
                return attend(h, **rest)

            def patch(args: Any, extra: Any) -> Any:
                options = args["transformer_options"]
                is_sparse = float(options["sigmas"][0]) <= limit and n not in dense
                given = [args[name] for name in ("img", "t_emb", "mod_segments", "rope_freqs")]
                own = attention if is_sparse else None
                return {"img": block(*given, transformer_options=options, attention=own)}

            return patch

        monkeypatch.setattr(owner, "forward", newer)
        for n, block in enumerate(blocks):
            model.set_model_patch_replace(replaced(n, block), "dit", "double_block", n)
        return model, calls, lengths

    return patched


@loop(
    ("start_percent", "dense", "merged_calls"),
    [
        (0.2, set(), BLOCKS),  # only the second step is neither sparse nor full
        (0.6, set(), 3 * BLOCKS),
        (0.2, {0, 3}, 5 * 2 + 2),  # blocks 0 and 3, never sparse, are merged in 5 steps
        (1.0, set(), 5 * BLOCKS),  # no step is sparse
    ],
)
def test_blocks_merge_before_the_sparse_part_and_around_it(
    start_percent: float, dense: set[int], merged_calls: int, sparse: Any, model_of: Any, stats_of: Any
) -> None:
    """A sparse block runs on all tokens. The report names sparse blocks."""
    model, calls, lengths = sparse(start_percent, dense)
    own, all_dense = sampled(model, steps=STEPS), balanced(model_of("h3"))
    sampled(all_dense, steps=STEPS)
    expected = list(calls)
    calls.clear()
    lengths.clear()
    merged = balanced(model)
    found = sampled(merged, steps=STEPS)
    assert calls == expected
    assert len([n for n in lengths if n < max(lengths)]) == merged_calls
    names = {f"double.{n}" for n in set(range(BLOCKS)) - dense}
    reason = Reason.ARGUMENT_IN_USE(arguments=("attention",))
    assert stats_of(merged).unmerged_names() == ({reason: names} if expected else {})
    pairs = sum(map(len, stats_of(merged).merged_at.values()))
    assert pairs == merged_calls
    times, most = (stats_of(each).times_less_work for each in (merged, all_dense))
    # The saved work is proportional to the number of merged blocks, summed over the steps.
    assert (1 - 1 / times) / (1 - 1 / most) == pytest.approx(pairs / (5 * BLOCKS))
    assert 0 < (found[0] - own[0]).norm() < 0.05 * own[0].norm()
    assert all(map(torch.equal, sampled(merged, steps=STEPS), found))
