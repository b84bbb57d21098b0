"""Flux.1 (dev, schnell, Fill, Kontext) and every other model that ComfyUI runs on its `Flux` class.

Only tokens of the image being made are merged. Text tokens and reference images stay whole and in place, and so does
the token count at every block's border, where ControlNets add.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from comfy.ldm.flux.model import Flux
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan, ToMAConfig, plan_for
from ...toma_core.config import Granularity, Share
from ...toma_core.detail import Detail
from .hooks import (
    EVALUATION,
    Hook,
    HookPair,
    detail_of,
    eager,
    evaluation_of,
    fits,
    installed,
    merge,
    outside_graph,
    reduce,
    restore,
    unmerge,
)

NAME = "Flux.1"

_TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch")


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this adapter knows the model."""
    return isinstance(diffusion_model, Flux)


def token_grid(latent: Tensor, patch_size: int) -> tuple[int, int]:
    """Rows and columns of image tokens of a (B, C, H, W) latent; odd sides are padded as Flux does."""
    height, width = latent.shape[-2:]
    return (height + patch_size // 2) // patch_size, (width + patch_size // 2) // patch_size


class _Merger(Hook):
    """What both kinds of block share: where the image tokens are, and whether they can be merged here."""

    kind: str

    def __init__(self, module: Any, index: int, positions: _Positions) -> None:
        self.module, self.index, self.positions = module, index, positions
        self.grid = (0, 0)

    def release(self) -> None:
        self.positions.held = None

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.index}"

    def scope(self, share: Share) -> Hashable:
        return {Share.LEVEL: "level", Share.STACK: self.kind, Share.BLOCK: self.name}[share]

    @eager
    def plan(self, image: Tensor, obstacles: dict[str, Any], transformer_options: dict[str, Any]) -> MergePlan | None:
        """The plan for the (B, H * W, C) tokens of the image, or None to leave the block whole; the outcome is noted
        in the run's stats. obstacles: arguments of the block that are tied to token positions, None if absent."""
        evaluation = evaluation_of(transformer_options)
        if evaluation is None:
            return None
        run = evaluation.run
        present = [name for name, value in obstacles.items() if value is not None]
        if present:
            run.stats.whole(self.name, f"{', '.join(present)} in use")
            return None
        if not fits(image, self.grid[0] * self.grid[1], evaluation):
            run.stats.whole(self.name, "another node changed the number of tokens")
            return None
        plan = plan_for(image, self.grid, self.scope(run.config.share), evaluation)
        if plan is None:
            run.stats.whole(self.name, f"fewer than {run.config.min_tokens} tokens")
        elif not evaluation.decision.keeps_detail:
            run.stats.merged(self.name)
        return plan


class _Positions:
    """RoPE rows of merged tokens, shared by the blocks of an evaluation that share a plan."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, MergePlan, Tensor] | None = None

    @eager
    def of(self, pe: Tensor | None, plan: MergePlan, before: int, detail: Detail | None) -> Tensor | None:
        """The rows for [before | D destinations | rest], see `_merged_rows`; pe itself for a block that runs whole to
        keep its detail, or if the model has no RoPE."""
        if pe is None or (detail is not None and detail.keeping):
            return pe
        if self.held is None or self.held[0] is not pe or self.held[1] is not plan:
            self.held = (pe, plan, _merged_rows(pe, plan, before))
        return self.held[2]


def _merged_rows(pe: Tensor, plan: MergePlan, before: int) -> Tensor:
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


class _DoubleBlock(_Merger):
    """A double block whose image stream runs on merged tokens; its text stream attends to them."""

    kind = "double"

    def __init__(self, module: Any, index: int, positions: _Positions) -> None:
        super().__init__(module, index, positions)
        self.parts = (_MergeIn(), _UnmergeOut(), _MergedLayer())

    @outside_graph
    def __call__(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        transformer_options: dict[str, Any] = {},  # noqa: B006
        **rest: Any,
    ) -> tuple[Tensor, Tensor]:
        call = {"txt": txt, "vec": vec, "attn_mask": attn_mask, "transformer_options": transformer_options, **rest}
        tokens = self.grid[0] * self.grid[1]
        plan = self.plan(img[:, :tokens], {"attn_mask": attn_mask, **rest}, transformer_options)
        if plan is None:
            return self.original(img=img, pe=pe, **call)
        config = transformer_options[EVALUATION].run.config
        detail = detail_of(self.name, transformer_options)
        call["pe"] = self.positions.of(pe, plan, txt.shape[1], detail)
        if config.granularity is Granularity.MODULE:
            return self._by_module(img, plan, config, pe, call)
        # The block adds into its input in place: it gets a copy, and what it was given stays for the difference.
        image, references = img[:, :tokens], img[:, tokens:]
        reduced = reduce(image, plan, detail)
        out, txt = self.original(img=torch.cat([reduced, references], 1), **call)
        kept = reduced.shape[1]
        restored = restore(out[:, :kept], reduced, image, plan, detail)
        return torch.cat([restored, out[:, kept:]], 1) if references.shape[1] else restored, txt

    def _by_module(
        self, img: Tensor, plan: MergePlan, config: ToMAConfig, pe: Any, call: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attention and MLP each between their own merge and unmerge, the residual stream whole, as in the paper."""
        inside, outside, mlp = self.parts
        hooks: list[tuple[nn.Module, _Layer]] = []
        if config.self_attention:
            hooks += [(self.module.img_attn.qkv, inside), (self.module.img_attn.proj, outside)]
        else:
            call["pe"] = pe
        if config.feed_forward:
            hooks.append((self.module.img_mlp, mlp))
        for _, hook in hooks:
            hook.plan = plan
        with installed(hooks):
            return self.original(img=img, **call)


class _Layer(Hook):
    """A layer inside a double block, applied to [image | references] tokens."""

    plan: MergePlan

    def release(self) -> None:
        del self.plan


class _MergeIn(_Layer):
    """qkv of merged tokens."""

    @outside_graph
    def __call__(self, x: Tensor) -> Tensor:
        return self.original(_merge_head(x, self.plan))


class _UnmergeOut(_Layer):
    """The output projection of merged tokens, spread over all."""

    @outside_graph
    def __call__(self, x: Tensor) -> Tensor:
        return _unmerge_head(self.original(x), self.plan)


class _MergedLayer(_Layer):
    """The MLP on merged tokens."""

    @outside_graph
    def __call__(self, x: Tensor) -> Tensor:
        return _unmerge_head(self.original(_merge_head(x, self.plan)), self.plan)


def _merge_head(x: Tensor, plan: MergePlan) -> Tensor:
    """(B, N + R, C) -> (B, D + R, C): merge the image, keep the references."""
    return torch.cat([merge(x[:, : plan.tokens], plan), x[:, plan.tokens :]], 1)


def _unmerge_head(y: Tensor, plan: MergePlan) -> Tensor:
    """(B, D + R, C) -> (B, N + R, C)."""
    return torch.cat([unmerge(y[:, : plan.kept], plan), y[:, plan.kept :]], 1)


class _SingleBlock(_Merger):
    """A single block on [text | merged image | references]."""

    kind = "single"

    @outside_graph
    def __call__(
        self,
        x: Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        transformer_options: dict[str, Any] = {},  # noqa: B006
        **rest: Any,
    ) -> Tensor:
        call = {"vec": vec, "attn_mask": attn_mask, "transformer_options": transformer_options, **rest}
        before = transformer_options["img_slice"][0]
        after = before + self.grid[0] * self.grid[1]
        text, image, references = x[:, :before], x[:, before:after], x[:, after:]
        plan = self.plan(image, {"attn_mask": attn_mask, **rest}, transformer_options)
        if plan is None:
            return self.original(x, pe=pe, **call)
        detail = detail_of(self.name, transformer_options)
        reduced = reduce(image, plan, detail)
        rows = self.positions.of(pe, plan, before, detail)
        out = self.original(torch.cat([text, reduced, references], 1), pe=rows, **call)
        end = before + reduced.shape[1]
        restored = restore(out[:, before:end], reduced, image, plan, detail)
        return torch.cat([out[:, :before], restored, out[:, end:]], 1)


class Hooks:
    """All hooks of one Flux model, made once and kept as long as the model lives."""

    def __init__(self, diffusion_model: Flux) -> None:
        self.patch_size = diffusion_model.patch_size
        self.blocks: list[_Merger] = []
        positions = _Positions()
        self.blocks += [_DoubleBlock(m, i, positions) for i, m in enumerate(diffusion_model.double_blocks)]
        self.blocks += [_SingleBlock(m, i, positions) for i, m in enumerate(diffusion_model.single_blocks)]

    def select(self, x: Tensor, evaluation: Evaluation, transformer_options: dict[str, Any]) -> Iterator[HookPair]:
        """The hooks to install for this evaluation of the (B, C, H, W) latent x."""
        config, stats = evaluation.run.config, evaluation.run.stats
        patches = transformer_options.get("patches", {})
        patched = any(patches.get(name) for name in _TOKEN_PATCHES)
        idle = config.granularity is Granularity.MODULE and not (config.self_attention or config.feed_forward)
        for block in self.blocks:
            first = config.flux_whole_double if block.kind == "double" else config.flux_whole_single
            if block.index < first:
                stats.whole(block.name, f"flux_whole_{block.kind} = {first}")
            elif block.kind == "double" and idle:
                stats.whole(block.name, "self_attention and feed_forward are off")
            elif patched:
                stats.whole(block.name, "another node's attention patch needs all tokens")
            else:
                block.grid = token_grid(x, self.patch_size)
                yield block.module, block
