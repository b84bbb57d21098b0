"""Other ways to look at fewer keys, beside the setting *keys only*: each changes the pack for a sampling run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module

from .experiments import Patch, during

# From the plan and (B, N, C) keys or values of the image to those that are looked at.
Fewer = Callable[[Any, Tensor], Tensor]


def _keys() -> Any:
    return pack_module("nodes.adapters.keys")


def looking_at(patch: Patch, fewer: Fewer) -> Patch:
    """Keys and values as told, in place of those of destinations."""

    def values(_: Any) -> dict[str, Any]:
        looks = pack_module("nodes.adapters.looks")

        def chosen(plan: Any, t: Tensor, what: str, before: int, axis: int) -> Tensor:
            rows, after = looks.flat(t, axis), before + plan.tokens
            seen = torch.cat([rows[:, :before], fewer(plan, rows[:, before:after]), rows[:, after:]], 1)
            out: Tensor = looks.like(seen, t, axis)
            return out

        return {"fewer": chosen}

    return during(patch, _keys, values)


def strided(patch: Patch, rows: int = 2, columns: int = 2) -> Patch:
    """One row in so many and one column in so many of every frame, as ToDo has it with two and two."""

    def fewer(plan: Any, t: Tensor) -> Tensor:
        frames, height, width = (1, *plan.windows.grid)[-3:]
        return t.unflatten(1, (frames, height, width))[:, :, ::rows, ::columns].flatten(1, 3)

    return looking_at(patch, fewer)


def means(patch: Patch) -> Patch:
    """Means of the keys and values that each destination stands for."""
    return looking_at(patch, lambda plan, t: pack_module("toma_core.merge").merge(t, plan))


def sizes(plan: Any) -> Tensor:
    """How many tokens each destination stands for. (B, D), for plans of windows that are all full."""
    counts: Tensor = plan.budget.pack(plan.unmerge_weights.sum(2)[..., None])
    return counts[..., 0]


def sized(patch: Patch, share: float = 1.0) -> Patch:
    """A share of the logarithm of what a key stands for, added to what attention makes of it: a mean of n tokens then
    weighs what n of them did. Goes by a mask, which the fast attentions do not take: for measuring alone."""

    def values(_: Any) -> dict[str, Any]:
        look: Any = pack_module("nodes.adapters.looks").Look

        class Sized(look):  # type: ignore[misc]
            def __call__(self, function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
                (plan,), ((before, tokens),) = self.change.args, self.attended

                def weighed(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
                    of_image = share * sizes(plan).to(q.dtype).clamp_min(1e-6).log()
                    mask = torch.nn.functional.pad(of_image, (before, tokens - before - plan.tokens))
                    return function(q, k, v, *args, **{**kwargs, "mask": mask[:, None]})

                return super().__call__(weighed, q, k, v, *args, **kwargs)

        return {"Look": Sized}

    return during(patch, lambda: pack_module("nodes.adapters.looks"), values)


def before_rotation(patch: Patch) -> Patch:
    """Keys and values of mean tokens, at the positions of their destinations: averaged before norm and rotation. For
    Wan's text to video, whose tokens are all of the image."""

    def values(_: Any) -> dict[str, Any]:
        from comfy.ldm.flux.math import apply_rope1, optimized_attention

        merge, rows = pack_module("toma_core.merge").merge, pack_module("nodes.adapters.rope").merged_rows

        def attend(self: Any, x: Tensor, freqs: Tensor, transformer_options: dict[str, Any]) -> Tensor:
            if self.asked is None:
                whole: Tensor = self.original(x, freqs, transformer_options=transformer_options)
                return whole
            (plan,), module = self.asked.keywords["change"].args, self.original.__self__
            few, heads = merge(x, plan), (module.num_heads, module.head_dim)
            q = apply_rope1(module.norm_q(module.q(x)).unflatten(2, heads), freqs)
            turned = rows(freqs, plan.destinations, 0, plan.tokens, 1)
            k = apply_rope1(module.norm_k(module.k(few)).unflatten(2, heads), turned)
            self.look = SimpleNamespace(served=1)
            out = optimized_attention(
                q.flatten(2), k.flatten(2), module.v(few), module.num_heads, transformer_options=transformer_options
            )
            attended: Tensor = module.o(out)
            return attended

        return {"__call__": attend}

    return during(patch, lambda: _keys().KeysAttention, values)
