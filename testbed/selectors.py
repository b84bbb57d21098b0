"""Rivals of greedy facility location: other rules that select the same number of destinations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module

Patch = Callable[[Any], Any]
# Selects destination slots as `select` does, given the similarities (B, W, S, S) of tokens, the windows and the budget.
Rule = Callable[[Tensor, Any, Any], Tensor]


def facility_location(similarity: Tensor, dest_slots: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the objective of `toma_core.selection` for the destinations of each window, (G,) fp32.

    similarity: (G, S, S); dest_slots: (G, K) int64; valid: (G, S) bool or None.
    """
    chosen = similarity.gather(1, dest_slots[..., None].expand(-1, -1, similarity.shape[-1]))
    best = chosen.amax(1) + 1
    return (best if valid is None else torch.where(valid, best, best.new_zeros(()))).sum(-1)


def farthest_point(similarity: Tensor, valid: Tensor | None, number: int) -> Tensor:
    """Select the most central token, then repeatedly the token that is least similar to all selected tokens.

    similarity: (G, S, S) fp32; valid: (G, S) bool or None. Returns (G, number) int64 slots, as all rules do.
    """
    padding = torch.zeros_like(similarity[..., 0], dtype=torch.bool) if valid is None else ~valid
    centrality = similarity.masked_fill(padding[:, :, None], 0.0).sum(1).masked_fill(padding, -torch.inf)
    represented = similarity.new_full(similarity.shape[:2], -2.0).masked_fill(padding, torch.inf)
    order: list[Tensor] = []
    for _ in range(number):
        pick = represented.argmin(1) if order else centrality.argmax(1)
        order.append(pick)
        picked = similarity.gather(2, pick[:, None, None].expand(-1, similarity.shape[1], 1)).squeeze(2)
        represented = torch.maximum(represented, picked).scatter(1, pick[:, None], torch.inf)
    return torch.stack(order, 1)


def tome_matching(similarity: Tensor, valid: Tensor | None, number: int) -> Tensor:
    """Select by ToMe's bipartite soft matching (Bolya & Hoffman 2023). Every fourth token is a candidate, and the
    others are sources. The sources most similar to a candidate are merged away until `number` tokens are left.

    similarity: (G, S, S) fp32; valid: (G, S) bool or None. ToMe does not define what happens if `number` is less than a
    quarter of the tokens. Here evenly spaced tokens are then selected.
    """
    slots = similarity.shape[1]
    candidate = torch.arange(slots, device=similarity.device) % 4 == 0
    best = similarity.masked_fill(~candidate, -torch.inf)
    if valid is not None:
        best = best.masked_fill(~valid[:, None, :], -torch.inf)
    closeness = best.amax(2)
    # Order of selection: first candidates, then sources (the least similar to a candidate first), then padding.
    cost = torch.where(candidate, closeness.new_full((), -3.0), closeness)
    if valid is not None:
        cost = cost.masked_fill(~valid, torch.inf)
    if number < -(-slots // 4):
        last = slots - 1 if valid is None else valid.sum(1, keepdim=True) - 1
        thinned = (torch.linspace(0, 1, number, device=cost.device) * last).round().long()
        cost = cost.scatter(1, thinned.expand(len(cost), -1), -4.0)
    return cost.argsort(dim=1, stable=True)[:, :number]


def strided_grid(counts: tuple[int, ...], budgets: tuple[int, ...], number: int) -> Tensor:
    """Return evenly spaced slots for windows of `counts` tokens with `budgets` destinations: (W, K), on the CPU."""
    index = torch.arange(number)
    middles = (index + 0.5) * torch.tensor(counts)[:, None] / torch.tensor(budgets)[:, None]
    return middles.long().minimum(torch.tensor(counts)[:, None] - 1)


@functools.lru_cache(maxsize=64)
def random_order(counts: tuple[int, ...], number: int, seed: int) -> Tensor:
    """Draw `number` distinct slots of windows of `counts` tokens from a local generator: (W, number) on the CPU."""
    tokens, slots = torch.tensor(counts)[:, None], max(*counts, number)
    keys = torch.rand(len(counts), slots, generator=torch.Generator().manual_seed(seed))
    keys = keys.masked_fill(torch.arange(slots) >= tokens, torch.inf)
    return keys.argsort(1)[:, :number].minimum(tokens - 1)


def rule(name: str, seed: int = 0) -> Rule:
    """Return a rival's selection, which replaces `toma_core.selection.select`. seed: for the rule "random"."""
    selection = pack_module("toma_core.selection")
    if name == "facility location":
        found: Rule = selection.select
        return found

    def picked(similarity: Tensor, windows: Any, budget: Any, priority: Tensor | None = None) -> Tensor:
        batch, count = similarity.shape[:2]
        if name == "random":
            order = random_order(windows.counts, budget.slots, seed)
        elif name == "grid":
            order = strided_grid(windows.counts, budget.counts, budget.slots)
        if name in ("random", "grid"):
            dest_slots = order.to(similarity.device).expand(batch, -1, -1)
        else:
            search = {"farthest point": farthest_point, "tome": tome_matching}[name]
            valid = None if windows.valid is None else windows.valid.repeat(batch, 1)
            dest_slots = search(similarity.flatten(0, 1), valid, budget.slots).view(batch, count, -1)
        return selection.in_reading_order(dest_slots, windows, budget)  # type: ignore[no-any-return]

    return picked


RIVALS = ("farthest point", "grid", "random", "tome")


@contextmanager
def selecting(name: str) -> Iterator[None]:
    """Let a rival select the destinations of every plan inside the context, in plain PyTorch. All windows have the same
    share of destinations. Only "farthest point" may have an adaptive budget."""
    state, kernels = pack_module("toma_core.run"), pack_module("toma_core.kernels.dispatch")
    laid_out = state.RunState._laid_out

    def evenly(self: Any, features: Tensor, grid: Any, decision: Any, even: bool) -> Any:
        return laid_out(self, features, grid, decision, even or name != "farthest point")

    def plain(*_: Any) -> Any:
        return kernels.Choice(None, f"destinations by {name}")

    with (
        mock.patch.multiple(state, select=rule(name)),
        mock.patch.multiple(state.RunState, _laid_out=evenly, _choose=plain),
    ):
        yield


def selected_by(patch: Patch, name: str) -> Patch:
    """Wrap `patch` so that a rival selects the destinations while the patched model samples."""

    def patched(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            with selecting(name):
                return executor(*args, **kwargs)

        # Add this wrapper before `patch` adds the pack's own, so that the pack's run begins inside this wrapper.
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "selector", run)
        return patch(model)

    return patched
