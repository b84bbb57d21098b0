"""A reimplementation of parallel sampling of one picture: raylight (xDiT) shares Flux's tokens, or the conditions of
any model, among processes.

`InTurn` simulates all processes of a group in a single process, which computes the shares one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import pad

# Function that runs a block, given the block's arguments for one share and the function that replaces attention.
Block = Callable[[Any, Callable[..., Tensor]], Any]


class InTurn:
    """A group in which this process holds all shares, and runs them one after the other."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.held = size, range(size)

    def join(self, shares: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(list(shares), dim)

    def run(self, block: Block, shares: Sequence[Any]) -> list[Any]:
        """Run the block twice on each share. The first call collects keys and values. In the second call, queries
        attend to the keys and values of all shares."""
        seen: list[tuple[Tensor, Tensor]] = []

        def collect(attention: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((k, v))
            return attention(q, k, v, *args, **kwargs)

        def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            return attention(q, *(torch.cat(found, 2) for found in zip(*seen, strict=True)), *args, **kwargs)

        for share in shares:  # copies, because blocks change their arguments in place
            block([t.clone() for t in share], collect)
        return [block(share, attend) for share in shares]


class Shares:
    """Patches a Flux with a sequence-parallel forward while it samples.

    rejoin: if True, as in raylight, double blocks receive the RoPE rows of the image only. Before the single blocks,
    [text | image] is joined and split again, but `img_slice` still refers to the joined sequence. If False, as in
    xDiT's own Flux, each process holds [its text | its image].
    """

    def __init__(self, group: Any, rejoin: bool = True) -> None:
        self.group, self.rejoin = group, rejoin

    def on(self, model: Any) -> Any:
        """Return a clone of a ModelPatcher. The clone samples with `_forward`."""
        import comfy.patcher_extension

        model = model.clone()
        model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, "parallel", self._sample)
        return model

    def _sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        flux = executor.class_obj.model_patcher.model.diffusion_model
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(flux, "forward_orig", MethodType(self._forward, flux)))
            for block in flux.double_blocks if self.rejoin else ():
                stack.enter_context(mock.patch.object(block, "forward", MethodType(_by_rows_of_image, block)))
            return executor(*args, **kwargs)

    def _cut(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the shares of x that this process holds. The length of x must be a multiple of the number of
        processes."""
        shares = x.chunk(self.group.size, dim)
        return [shares[rank] for rank in self.group.held]

    def _even(self, x: Tensor) -> Tensor:
        """Pad T of (B, T, C) with zeros, so that all shares have the same length."""
        return pad(x, (0, 0, 0, -x.shape[1] % self.group.size))

    def _forward(
        self,
        flux: Any,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y: Tensor,
        guidance: Tensor,
        *_: Any,
        transformer_options: dict[str, Any],
        **__: Any,
    ) -> Tensor:
        """Compute ComfyUI's `Flux.forward_orig` without its optional parts: ControlNets, masks, patches."""
        from comfy.ldm.flux.layers import timestep_embedding

        images, texts = img.shape[1], txt.shape[1]
        img, img_ids, txt, txt_ids = map(self._even, (img, img_ids, txt, txt_ids))
        vec = flux.time_in(timestep_embedding(timesteps, 256)) + flux.guidance_in(timestep_embedding(guidance, 256))
        vec = vec + flux.vector_in(y[:, : flux.params.vec_in_dim])
        options = {**transformer_options}

        def run(block: Any, shares: Sequence[Any], *names: str) -> list[Any]:
            def one(share: Any, attend: Any) -> Any:
                block_options = {**options, "optimized_attention_override": attend}
                return block(**dict(zip(names, share, strict=True)), vec=vec, transformer_options=block_options)

            return self.group.run(one, shares)

        def both(t: Tensor, i: Tensor) -> list[Tensor]:
            return [torch.cat(pair, 1) for pair in zip(self._cut(t, 1), self._cut(i, 1), strict=True)]

        joined_ids, own = torch.cat((txt_ids, img_ids), 1), both(txt_ids, img_ids)
        rows = self._cut(flux.pe_embedder(img_ids), 2) if self.rejoin else [flux.pe_embedder(ids) for ids in own]
        pairs = list(zip(self._cut(flux.img_in(img), 1), self._cut(flux.txt_in(txt), 1), strict=True))
        for block in flux.double_blocks:
            shares = [(*pair, pe) for pair, pe in zip(pairs, rows, strict=True)]
            pairs = run(block, shares, "img", "txt", "pe")

        if self.rejoin:
            img, txt = (self.group.join(shares, 1) for shares in zip(*pairs, strict=True))
            x = self._cut(self._even(torch.cat((txt[:, :texts], img[:, :images]), 1)), 1)
            rows, before = self._cut(flux.pe_embedder(joined_ids), 2), texts
        else:
            x, before = [torch.cat((t, i), 1) for i, t in pairs], txt.shape[1] // self.group.size
        options["img_slice"] = [before, x[0].shape[1]]
        for block in flux.single_blocks:
            x = run(block, list(zip(x, rows, strict=True)), "x", "pe")
        if self.rejoin:
            out = self.group.join(x, 1)[:, texts : texts + images]
        else:
            out = self.group.join([share[:, before:] for share in x], 1)[:, :images]
        final: Tensor = flux.final_layer(out, vec)
        return final


def _by_rows_of_image(block: Any, img: Tensor, txt: Tensor, pe: Tensor, **others: Any) -> Any:
    """Run a double block whose `pe` lacks the text. The text gets identity rotations, because Flux's text is at
    position 0."""
    still = torch.eye(2).expand(*pe.shape[:2], txt.shape[1], *pe.shape[3:])
    return type(block).forward(block, img=img, txt=txt, pe=torch.cat((still, pe), 2), **others)


def by_condition(group: Any, model: Any) -> Any:
    """Return a clone of a ModelPatcher of which each process of the group evaluates one condition (CFG parallelism)."""
    import comfy.patcher_extension

    def evaluate(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        batch = args[0].shape[0]

        def own(value: Any, rank: int) -> Any:
            batched = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
            return value.chunk(group.size)[rank] if batched else value

        shares = []
        for rank in group.held:
            own_kwargs = {name: own(value, rank) for name, value in kwargs.items()}
            shares.append(executor(*(own(value, rank) for value in args), **own_kwargs))
        joined: Tensor = group.join(shares, 0)
        return joined

    model = model.clone()
    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "parallel", evaluate)
    return model
