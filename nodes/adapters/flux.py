"""Flux.1 (dev, schnell, Fill, Kontext) and every other model that ComfyUI runs on its `Flux` class.

Only tokens of the image being made are merged. Text tokens and reference images stay whole and in place. Consecutive
blocks stay merged as long as nobody looks between them: where a ControlNet adds or another node replaces a block, all
tokens are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from comfy.ldm.flux.model import Flux
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan, ToMAConfig, plan_for
from ...toma_core.config import Granularity, Share
from ...toma_core.detail import Detail
from ...toma_core.payoff import FLUX_DOUBLE, FLUX_SINGLE, Block
from .flux_layers import Layer, MergedLayer, MergeIn, UnmergeOut
from .flux_positions import SHARE, STRANGE, FluxPlace, Positions, in_range, share, strange
from .hooks import GRAPHS, Hook, HookPair, eager, fits, installed, outside_graph, reduce, restore
from .layout import shortened

NAME = "Flux.1"

_TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch")
# Arguments of a block that say nothing of single image tokens.
_HARMLESS = ("txt", "vec", "transformer_options")


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this adapter knows the model."""
    return isinstance(diffusion_model, Flux)


def token_grid(latent: Tensor, patch_size: int) -> tuple[int, int]:
    """Rows and columns of image tokens of a (B, C, H, W) latent; odd sides are padded as Flux does."""
    height, width = latent.shape[-2:]
    return (height + patch_size // 2) // patch_size, (width + patch_size // 2) // patch_size


class _Chain:
    """Consecutive blocks of one kind between which tokens stay merged."""

    def __init__(self, blocks: Sequence[_Merger], evaluation: Evaluation) -> None:
        self.first, self.last, self.evaluation = blocks[0], blocks[-1], evaluation
        self.names = [block.name for block in blocks]
        # Between the first block and the last: what `restore` needs beside their output. None: the chain runs whole.
        self.held: tuple[Tensor, Tensor, MergePlan, Detail | None] | None = None


class _Merger(Hook):
    """What both kinds of block share: where the image tokens are, and whether they can be merged here."""

    kind: str
    work: Block
    chain: _Chain
    # Of the chain's first block, and whether this is its last: all that a graph of torch.compile knows of a chain.
    begin: FluxPlace
    ends: bool

    def __init__(self, module: Any, index: int, positions: Positions) -> None:
        self.module, self.index, self.positions = module, index, positions
        self.grid = (0, 0)
        self.place = FluxPlace()

    def release(self) -> None:
        self.positions.held = self.positions.text = None
        self.place.release()
        del self.chain

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.index}"

    def scope(self, share: Share) -> Hashable:
        # There is one resolution, but tokens of one kind of block say little of those of the other.
        return self.name if share is Share.BLOCK else self.kind

    @eager
    def plan(self, image: Tensor, obstacles: dict[str, Any]) -> MergePlan | None:
        """The plan for the (B, H * W, C) tokens of the image, or None to leave the chain whole; the outcome is noted
        in the run's stats. obstacles: arguments of a block that are tied to token positions, None if absent."""
        # Not from transformer_options: step caches that run the blocks themselves hand none over.
        evaluation = self.chain.evaluation
        run, plan = evaluation.run, None
        present = [name for name, value in obstacles.items() if value is not None]
        if SHARE in present or not fits(image, self.grid[0] * self.grid[1], evaluation):
            reason = "another node changed the number of tokens"
        elif present:
            reason = f"{', '.join(present)} in use"
        else:
            plan = plan_for(image, self.grid, self.scope(run.config.share), evaluation, self.work)
            reason = "" if plan else evaluation.obstacle(image, self.work)
        for name in self.chain.names:
            if plan is None:
                run.stats.whole(name, reason)
            elif not evaluation.decision.keeps_detail:
                run.stats.merged(name)
        return plan

    def obstacles(self, pe: Any, tokens: int, others: dict[str, Any]) -> dict[str, Any]:
        """Arguments that are tied to token positions, None if absent: all that are not known to be harmless."""
        tied = {k: v for k, v in others.items() if k not in _HARMLESS}
        shared = share(tokens, self.grid[0] * self.grid[1], others)
        return {**tied, STRANGE: strange(pe, tokens), SHARE: shared}

    def in_graph(
        self, x: Tensor, pe: Any, text: int, before: int, others: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Tokens and RoPE rows for this block where its chain is merged inside a graph of torch.compile, else None.

        text: rows of pe before the image. before: tokens of x before it. others: the block's further arguments.
        """
        place = self.begin
        if place is self.place and place.begins(x, before):
            obstacles = self.obstacles(pe, text - before + x.shape[1], others)
            if all(value is None for value in obstacles.values()):
                x = place.enter(x, before)
                if pe is not None:
                    place.turn(pe, text)
        return None if place.held is None else (x, place.pe)

    def out_of_graph(self, out: Tensor, before: int) -> Tensor:
        """All image tokens again after the last block of a chain that `in_graph` began."""
        return self.begin.leave(out, before) if self.ends else out

    @eager
    def enter(self, x: Tensor, before: int, obstacles: dict[str, Any]) -> Tensor:
        """[before | image | references] with the image merged; after the first block of a chain it already is."""
        if self.chain.first is not self:
            return x
        after = before + self.grid[0] * self.grid[1]
        image = x[:, before:after]
        plan = self.plan(image, obstacles)
        if plan is None:
            return x
        detail = self.chain.evaluation.detail("-".join((self.name, self.chain.last.name)), image)
        reduced = in_range(reduce(image, plan, detail))
        self.chain.held = (reduced, image, plan, detail)
        # Blocks add into their input in place: they get a copy, what they were given stays for the difference.
        return torch.cat([x[:, :before], reduced, x[:, after:]], 1)

    def rows(self, pe: Any, before: int) -> Any:
        """RoPE rows for the tokens as they are inside the chain."""
        if self.chain.held is None:
            return pe
        _, _, plan, detail = self.chain.held
        return self.positions.of(pe, plan, before, detail)

    def told(self, others: dict[str, Any]) -> dict[str, Any]:
        """The block's further arguments for the tokens as they are inside the chain."""
        held = self.chain.held
        return others if held is None else _told(others, held[1].shape[1], held[0].shape[1])

    @eager
    def leave(self, out: Tensor, before: int) -> Tensor:
        """All image tokens again after the last block of a chain."""
        held = self.chain.held
        if held is None or self.chain.last is not self:
            return out
        self.chain.held = None
        after = before + held[0].shape[1]
        restored = in_range(restore(out[:, before:after], *held))
        around = out[:, :before], out[:, after:]
        return torch.cat([around[0], restored, around[1]], 1) if any(t.shape[1] for t in around) else restored


class _DoubleBlock(_Merger):
    """A double block whose image stream runs on merged tokens; its text stream attends to them."""

    kind, work = "double", FLUX_DOUBLE

    def __call__(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        *,
        transformer_options: dict[str, Any] = {},  # noqa: B006
        **rest: Any,
    ) -> tuple[Tensor, Tensor]:
        others = {"txt": txt, "vec": vec, "attn_mask": attn_mask, "transformer_options": transformer_options, **rest}
        traced = self.in_graph(img, pe, txt.shape[1], 0, others) if self.begin.kept else None
        if traced is None:
            return self.outside(img, pe, others)
        out, txt = self.original(img=traced[0], pe=traced[1], **_told(others, self.begin.tokens, self.begin.kept))
        return self.out_of_graph(out, 0), txt

    @outside_graph
    def outside(self, img: Tensor, pe: Any, others: dict[str, Any]) -> tuple[Tensor, Tensor]:
        text = self.positions.text = others["txt"].shape[1]
        return self.run(img, pe, self.obstacles(pe, text + img.shape[1], others), others)

    @outside_graph
    def run(self, img: Tensor, pe: Any, obstacles: dict[str, Any], others: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The block on [image | references] with the RoPE rows of text and image. others: its further arguments."""
        reduced = self.enter(img, 0, obstacles)
        out, txt = self.original(img=reduced, pe=self.rows(pe, others["txt"].shape[1]), **self.told(others))
        return self.leave(out, 0), txt


class _DoubleBlockByModule(_DoubleBlock):
    """A double block with attention and MLP each between their own merge and unmerge, the residual stream whole, as in
    the paper."""

    def __init__(self, module: Any, index: int, positions: Positions) -> None:
        super().__init__(module, index, positions)
        self.parts = (MergeIn(), UnmergeOut(), MergedLayer())

    def layers(self) -> tuple[tuple[nn.Module, Layer], ...]:
        """Query, key and value; what follows the attention; the MLP. Looked up anew, as others may replace them."""
        attention = self.module.img_attn
        return tuple(zip((attention.qkv, attention.proj, self.module.img_mlp), self.parts, strict=True))

    @outside_graph
    def run(self, img: Tensor, pe: Any, obstacles: dict[str, Any], others: dict[str, Any]) -> tuple[Tensor, Tensor]:
        plan = self.plan(img[:, : self.grid[0] * self.grid[1]], obstacles)
        if plan is None:
            return self.original(img=img, pe=pe, **others)
        config = self.chain.evaluation.run.config
        *attention, mlp = self.layers()
        hooks: list[tuple[nn.Module, Layer]] = []
        if config.self_attention:
            hooks += attention
            pe = self.positions.of(pe, plan, others["txt"].shape[1], None)
            others = _told(others, plan.tokens, plan.kept)
        if config.feed_forward:
            hooks.append(mlp)
        for _, hook in hooks:
            hook.plan = plan
        with installed(hooks):
            return self.original(img=img, pe=pe, **others)


class _SingleBlock(_Merger):
    """A single block on [text | merged image | references]."""

    kind, work = "single", FLUX_SINGLE

    def __call__(
        self,
        x: Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        *,
        transformer_options: dict[str, Any] = {},  # noqa: B006
        **rest: Any,
    ) -> Tensor:
        others = {"vec": vec, "attn_mask": attn_mask, "transformer_options": transformer_options, **rest}
        if self.begin.kept and "img_slice" in transformer_options:
            before = transformer_options["img_slice"][0]
            traced = self.in_graph(x, pe, before, before, others)
            if traced is not None:
                told = _told(others, self.begin.tokens, self.begin.kept)
                return self.out_of_graph(self.original(traced[0], pe=traced[1], **told), before)
        return self.outside(x, pe, others)

    @outside_graph
    def outside(self, x: Tensor, pe: Any, others: dict[str, Any]) -> Tensor:
        text = x.shape[1] if self.positions.text is None else self.positions.text
        before = others["transformer_options"].get("img_slice", (text,))[0]  # no image tokens where nobody says which
        reduced = self.enter(x, before, self.obstacles(pe, x.shape[1], others))
        out = self.original(reduced, pe=self.rows(pe, before), **self.told(others))
        return self.leave(out, before)


class Hooks:
    """All hooks of one Flux model, made once and kept as long as the model lives."""

    def __init__(self, diffusion_model: Flux) -> None:
        self.model = ref(diffusion_model)  # weak: the model itself is the key that these hooks are kept under
        self.patch_size = diffusion_model.patch_size
        positions = Positions()
        doubles, singles = diffusion_model.double_blocks, diffusion_model.single_blocks
        self.blocks: list[_Merger] = [_DoubleBlock(m, i, positions) for i, m in enumerate(doubles)]
        self.blocks += [_SingleBlock(m, i, positions) for i, m in enumerate(singles)]
        self.by_module = [_DoubleBlockByModule(m, i, positions) for i, m in enumerate(doubles)]

    def whole_every(self, config: ToMAConfig) -> int:
        """Of how many steps one runs whole."""
        return config.flux_whole_every

    def places(self) -> Iterator[HookPair]:
        """Blocks and the layers inside them with the hooks that may stand in for them."""
        for block in (*self.blocks, *self.by_module):
            yield block.module, block
        for block in self.by_module:
            yield from block.layers()

    def select(
        self, x: Tensor, evaluation: Evaluation, transformer_options: dict[str, Any], control: Any = None
    ) -> Iterator[HookPair]:
        """The hooks to install for this evaluation of the (B, C, H, W) latent x. control: what ControlNets add, under
        "input" after double blocks and under "output" after single ones, None where they add nothing."""
        config, stats = evaluation.run.config, evaluation.run.stats
        patches = transformer_options.get("patches", {})
        patched = any(patches.get(name) for name in _TOKEN_PATCHES)
        seen = transformer_options.get("patches_replace", {}).get("dit", {}), control or {}
        by_module = config.granularity is Granularity.MODULE
        idle = by_module and not (config.self_attention or config.feed_forward)
        # Whoever runs the blocks in a loop of their own, as step caches do, may look at what is between any two.
        model = self.model()
        chained = config.granularity is Granularity.STACK and "forward_orig" not in vars(model)
        chains: list[list[_Merger]] = []
        for block in self.blocks:
            first = config.flux_whole_double if block.kind == "double" else config.flux_whole_single
            if block.index < first:
                stats.whole(block.name, f"flux_whole_{block.kind} = {first}")
            elif block.kind == "double" and idle:
                stats.whole(block.name, "self_attention and feed_forward are off")
            elif patched:
                stats.whole(block.name, "another node's attention patch needs all tokens")
            elif block.kind == "double" and by_module:
                chains.append([self.by_module[block.index]])
            elif chains and chained and _unseen_between(chains[-1][-1], block, *seen):
                chains[-1].append(block)
            else:
                chains.append([block])
        for blocks in chains:
            chain = _Chain(blocks, evaluation)
            grid, begin = token_grid(x, self.patch_size), blocks[0]
            if transformer_options.get(GRAPHS) and not isinstance(begin, _DoubleBlockByModule):
                scope, width = begin.scope(config.share), getattr(model, "hidden_size", 0)
                if not begin.place.prepare(x, grid, scope, chain.names, evaluation, begin.module, width, begin.work):
                    continue
            for block in blocks:
                block.chain, block.grid, block.begin, block.ends = chain, grid, begin.place, block is blocks[-1]
                yield block.module, block


def _told(others: dict[str, Any], tokens: int, kept: int) -> dict[str, Any]:
    """A block's further arguments, where so many of the image's tokens are kept."""
    return {**others, "transformer_options": shortened(others["transformer_options"], tokens, kept)}


def _unseen_between(block: _Merger, following: _Merger, replaced: dict[Any, Any], control: dict[str, Any]) -> bool:
    """Whether the second block takes what the first one gives, and nobody else does."""
    if (block.kind, block.index + 1) != (following.kind, following.index):
        return False
    added = control.get("input" if block.kind == "double" else "output") or ()
    if block.index < len(added) and added[block.index] is not None:
        return False
    return not any((f"{b.kind}_block", b.index) in replaced for b in (block, following))
