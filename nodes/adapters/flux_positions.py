"""Rotary positions of merged tokens in Flux, and what else it asks of merging inside a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...toma_core import MergePlan
from ...toma_core.detail import Detail
from .graphs import Place, operators
from .hooks import eager


class Positions:
    """RoPE rows of merged tokens, shared by the blocks of an evaluation that share a plan; and the number of text
    tokens, seen in the double blocks."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, MergePlan, Tensor] | None = None
        self.text: int | None = None

    @eager
    def of(self, pe: Tensor | None, plan: MergePlan, before: int, detail: Detail | None) -> Tensor | None:
        """The rows for [before | D destinations | rest], see `merged_rows`; pe itself for a block that runs whole to
        keep its detail, or if the model has no RoPE."""
        if pe is None or (detail is not None and detail.kept is None):
            return pe
        if self.held is None or self.held[0] is not pe or self.held[1] is not plan:
            self.held = (pe, plan, merged_rows(pe, plan, before))
        return self.held[2]


def merged_rows(pe: Tensor, plan: MergePlan, before: int) -> Tensor:
    """RoPE rows for [before | D destinations | rest]: each destination keeps its own position.

    pe: (B or 1, 1, T, d/2, 2, 2) for T = before + N + rest rows.
    """
    after = before + plan.tokens
    image = pe[:, :, before:after]
    rows = plan.destinations
    image = image.expand(rows.shape[0], *image.shape[1:])
    rows = rows.view(rows.shape[0], 1, -1, *[1] * (pe.ndim - 3)).expand(-1, image.shape[1], -1, *pe.shape[3:])
    parts = [t.expand(rows.shape[0], *t.shape[1:]) for t in (pe[:, :, :before], pe[:, :, after:])]
    return torch.cat([parts[0], image.gather(2, rows), parts[1]], 2)


STRANGE = "pe of unknown shape"


def strange(pe: Any, tokens: int) -> Any:
    """pe itself if its rows are not those of so many tokens, else None."""
    return None if pe is None or (isinstance(pe, Tensor) and pe.ndim > 3 and pe.shape[2] >= tokens) else pe


SHARE = "a share of the tokens"


def share(tokens: int, image: int, others: dict[str, Any]) -> int | None:
    """tokens itself where a block has fewer than text, `image` tokens and references together, else None: as one of
    several processes that share them (raylight, xDiT). Its first tokens would pass for the image, in every process,
    as soon as references make a share long enough. others: the block's arguments."""
    options = others["transformer_options"]
    text = others["txt"].shape[1] if "txt" in others else options.get("img_slice", (0,))[0]
    whole = text + image + sum(options.get("reference_image_num_tokens", ()))
    return tokens if tokens < whole else None


def in_range(x: Tensor) -> Tensor:
    """fp16 cut off as the model does it after its blocks: weights sum to 1 up to rounding only, and a token that sits
    at the limit would become infinite. Other dtypes as they are."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype is torch.float16 else x


class FluxPlace(Place):
    """Blocks add into what they are given, fp16 stays in range, and RoPE follows the destinations.

    pe: the rows of the tokens inside the chain, None if the model has none.
    """

    pe: Tensor | None

    def release(self) -> None:
        super().release()
        self.pe = None

    def enter(self, x: Tensor, before: int = 0) -> Tensor:
        return super().enter(x, before).clone()

    def turn(self, pe: Tensor, before: int) -> None:
        """Make the rows for what `enter` gave from those of [before | N | rest]."""
        whole, place = self.kept == self.tokens, (self.number, before, self.tokens, self.kept)
        self.pe = pe if whole else operators.turn(pe, self.held[0], *place)

    def leave(self, out: Tensor, before: int = 0) -> Tensor:
        self.pe = None
        return super().leave(out, before)

    def now_enter(self, image: Tensor) -> Tensor:
        return in_range(super().now_enter(image))

    def now_leave(self, out: Tensor, reduced: Tensor, image: Tensor) -> Tensor:
        return in_range(super().now_leave(out, reduced, image))

    def now_turn(self, pe: Tensor, before: int) -> Tensor:
        """`turn` when the graph runs."""
        return merged_rows(pe, self.plan, before)
