"""Ideas that are measured before they may become settings: each changes the pack for the length of a sampling run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module

Patch = Callable[[Any], Any]


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def during(patch: Patch, owner: Callable[[], Any], values: Callable[[Any], dict[str, Any]]) -> Patch:
    """`patch`, and while such a model samples, attributes of an object of the pack are others.

    values: from the object as it is to its new attributes.
    """

    def patched(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            changed = owner()
            with replaced(changed, values(changed)):
                return executor(*args, **kwargs)

        # Added first, so that it is the outermost wrapper: the pack's own run begins inside.
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "experiment", run)
        return patch(model)

    return patched


def _state() -> Any:
    return pack_module("toma_core.run")


def packed(patch: Patch) -> Patch:
    """What is kept of keys is in four bits a number, as of models and videos that are larger."""
    return during(patch, lambda: pack_module("nodes.adapters.kv_memory"), lambda _: {"memory_left": lambda *_: 0})


def own_destinations(patch: Patch) -> Patch:
    """Every condition has destinations of its own."""

    def values(sampling: Any) -> dict[str, Any]:
        def plan_keys(self: Any, chunks: tuple[Any, ...], frames: Any) -> tuple[Any, ...]:
            return chunks

        return {"plan_keys": plan_keys}

    return during(patch, lambda: pack_module("nodes.adapters.patch_model").SamplingRun, values)


def centred(patch: Patch) -> Patch:
    """Cosines of tokens from which the mean token of their image is taken."""

    def values(state: Any) -> dict[str, Any]:
        def less_mean(x: Tensor) -> Tensor:
            return x.float() - x.float().mean((1, 2), keepdim=True)

        similarity, weigh = state.cosine_similarity, state.weigh
        return {
            "cosine_similarity": lambda x: similarity(less_mean(x)),
            "weigh": lambda x, *args: weigh(less_mean(x), *args),
        }

    return during(patch, _state, values)


def pseudo_inverse(patch: Patch) -> Patch:
    """Results go back by the least-squares inverse of the merge in place of A^T."""

    def values(state: Any) -> dict[str, Any]:
        weigh = state.weigh

        def inverted(*args: Any) -> Any:
            *rest, dtype = args
            plan = weigh(*rest, torch.float32)
            M = plan.merge_weights
            back = least_squares_inverse(M, plan.budget.valid)
            return dataclasses.replace(plan, merge_weights=M.to(dtype), unmerge_weights=back.to(dtype).contiguous())

        return {"weigh": inverted}

    return during(patch, _state, values)


def least_squares_inverse(M: Tensor, used: Tensor | None) -> Tensor:
    """M^+ = M^T (M M^T)^-1 per window. (B, W, K, S) fp32 -> (B, W, S, K).

    A small ridge keeps nearly equal destinations from blowing up. used: (W, K), the rows that are destinations; None
    if all are. The columns of the others are zeros.
    """
    gram = M @ M.transpose(-1, -2)
    count = M.shape[-2] if used is None else used.sum(-1)
    mean = gram.diagonal(dim1=-2, dim2=-1).sum(-1) / count
    diagonal = 1e-4 * mean[..., None].expand(M.shape[:-1])
    if used is not None:
        diagonal = diagonal + ~used
    solution: Tensor = torch.linalg.solve(gram + torch.diag_embed(diagonal), M)
    return solution.transpose(-1, -2)


def refreshed(patch: Patch, early: tuple[int, int], late: tuple[int, int]) -> Patch:
    """Intervals of selecting and weighing in the first half of the steps, and in the second."""

    def values(run: Any) -> dict[str, Any]:
        class Schedule(run.Schedule):  # type: ignore[name-defined, misc]
            def decide(self, sigma: float, step: int | None = None) -> Any:
                decision = super().decide(sigma, step)
                middle = len(self.sigmas) // 2
                # Generations of the second half are other numbers than those of the first.
                age, (select, weigh) = (
                    (decision.step, early) if decision.step < middle else (decision.step - middle, late)
                )
                base = 0 if decision.step < middle else 1000
                return dataclasses.replace(decision, selection=base + age // select, weighing=base + age // weigh)

        return {"Schedule": Schedule}

    return during(patch, lambda: pack_module("nodes.adapters.sampling_run"), values)


def control_variate(ratio: float, every: int, attach: Callable[..., Patch]) -> Patch:
    """Output = last whole output + (merged output now - merged output at that whole step), on the velocity.

    Every so many steps the model runs whole and merged; at the others only merged.
    """

    def patch(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        run = pack_module("nodes.adapters.model_hooks")

        class Held:
            index = 0
            offset: Any = None

        def start(executor: Any, *args: Any, **kwargs: Any) -> Any:
            Held.index, Held.offset = 0, None
            return executor(*args, **kwargs)

        def predict(executor: Any, x: Tensor, timestep: Tensor, model_options: dict[str, Any], *args: Any) -> Any:
            sigma = timestep.view(-1, *[1] * (x.ndim - 1))
            merged = (x - executor(x, timestep, model_options, *args)) / sigma
            if Held.index % every == 0:
                options = model_options["transformer_options"]
                plain = {k: v for k, v in options.items() if k not in (run.ATTACHMENT, run.SAMPLING)}
                whole = executor(x, timestep, {**model_options, "transformer_options": plain}, *args)
                Held.offset = (x - whole) / sigma - merged
            Held.index += 1
            return x - sigma * (merged + Held.offset)

        model = attach(ratio=ratio)(model.clone())
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "variate", start)
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "variate", predict)
        return model

    return patch


def moved_budget(patch: Patch, most: float = 1.5) -> Patch:
    """The D destinations of an image go to the windows where they gain most, at most `most` times an equal share.

    Windows do not touch each other, so the largest gains of all windows together are the greedy choice for the image.
    """

    def values(_: Any) -> dict[str, Any]:
        state = _state()

        def selected(self: Any, x: Tensor, features: Tensor, grid: tuple[int, int], decision: Any, *_: Any) -> Any:
            config = self.config
            windows, budget = self._layout(grid, decision, x.device)
            tokens = windows.split(features)
            similarity = state.cosine_similarity(tokens)
            batch, count, slots = similarity.shape[:3]
            if windows.valid is not None:
                raise ValueError("budgets are moved between full windows only")
            greedy = pack_module("toma_core.selection.greedy").greedy_facility_location
            largest = min(slots, round(most * budget.slots))
            order = greedy(similarity.flatten(0, 1), None, largest).view(batch, count, largest)
            best = similarity.gather(2, order[..., None].expand(-1, -1, -1, slots)).cummax(2).values.sum(-1)
            gains = torch.cat([torch.full_like(best[..., :1], torch.inf), best.diff(dim=-1)], -1)
            # The first pick of every window has an infinite gain: no window goes without.
            chosen = gains.flatten(1).topk(budget.total, dim=1).indices
            valid = torch.zeros(batch, count * largest, dtype=torch.bool).scatter(1, chosen, True)
            counts = valid.view(batch, count, largest).sum(-1, keepdim=True)
            valid = torch.arange(largest) < counts
            picks = order.masked_fill(~valid, slots).sort(-1).values
            picks = torch.where(picks == slots, picks[..., :1], picks)
            compact = valid.flatten(1).nonzero()[:, 1].view(batch, -1)
            first = counts.cumsum(1) - counts
            expand = torch.where(valid, first + torch.arange(largest), first).flatten(1)
            own = pack_module("toma_core.windows").Budget(budget.counts, compact, expand, valid)
            return state.weigh(tokens, picks, windows, own, config.sharpness, x.dtype)

        return {"_selected": selected}

    return during(patch, lambda: _state().RunState, values)


def through_frames(cut: Callable[..., Any], side: int) -> Callable[..., Any]:
    """`make_windows` with windows of side x side tokens through all frames. cut: the pack's own, for one frame."""
    windows = pack_module("toma_core.windows").Windows

    def make(height: int, width: int, kind: Any, size: int, shifted: bool = False, frames: int = 1) -> Any:
        if frames == 1:
            return cut(height, width, kind, size, shifted)
        inside = cut(height, width, kind, side, shifted)
        starts = height * width * torch.arange(frames)
        source = (inside.source[:, None] + starts[:, None]).flatten(1)
        valid = None if inside.valid is None else inside.valid.repeat(1, frames)
        used = torch.ones_like(source, dtype=torch.bool) if valid is None else valid
        inverse = torch.empty(frames * height * width, dtype=torch.int64)
        inverse[source[used]] = used.flatten().nonzero().squeeze(1)
        counts = tuple(used.sum(1).tolist())
        cuts = (0, 1, frames * height), (0, width)  # no tiles, which go by rows
        return windows(frames * height, width, counts, source, valid, inverse, False, cuts)

    return make


def over_frames(patch: Patch, side: int = 4) -> Patch:
    """Windows through all frames of a clip, in place of windows inside each. Frames then keep different numbers of
    tokens, which only models do not mind that tell all frames the same."""
    return during(patch, _state, lambda state: {"make_windows": through_frames(state.make_windows, side)})


def picked(patch: Patch) -> Patch:
    """Blocks are given the destinations themselves, not means of what they stand for; with detail reuse they are so
    already."""

    def values(chain: Any) -> dict[str, Any]:
        own, pick = chain.reduce, pack_module("toma_core.merge").gather_destinations

        def reduce(x: Tensor, plan: Any, detail: Any = None) -> Tensor:
            return own(x, plan, detail) if plan is None or detail is not None else pick(x, plan)

        return {"reduce": reduce}

    return during(patch, lambda: pack_module("nodes.adapters.active_chain"), values)


def norm_kept(patch: Patch) -> Patch:
    """Means of tokens, as long as the tokens were: means of different ones are shorter than any of them."""

    def values(chain: Any) -> dict[str, Any]:
        own, merge = chain.reduce, pack_module("toma_core.merge").merge

        def reduce(x: Tensor, plan: Any, detail: Any = None) -> Tensor:
            means = own(x, plan, detail)
            if plan is None or detail is not None:
                return means
            lengths = merge(x.norm(dim=-1, keepdim=True), plan)
            return means * (lengths / means.norm(dim=-1, keepdim=True).clamp_min(1e-6))

        return {"reduce": reduce}

    return during(patch, lambda: pack_module("nodes.adapters.active_chain"), values)


def exact(patch: Patch) -> Patch:
    """Destinations go into a block as they are: queries, output and MLP are theirs, keys and values those of all
    tokens. For Flux merged around each block. Keys and values come from running the block whole before, so that this
    shows what is lost, not what it costs: at 1024 x 1024 0.61 of a Flux block's work at 0.5, 0.42 at 0.75."""

    def values(link: Any) -> dict[str, Any]:
        from comfy.ldm.flux import layers
        from comfy.ldm.flux.math import apply_rope1, optimized_attention

        merged, called = link.merged_call_args, link._called
        whole: list[dict[str, Any]] = []

        def noted(self: Any, given: dict[str, Any], *args: Any) -> Any:
            whole[:] = [given]
            return merged(self, given, *args)

        def run(self: Any, by_place: int, given: dict[str, Any]) -> Any:
            if not whole:
                return called(self, by_place, given)
            seen: list[Tensor] = []

            def watch(q: Tensor, k: Tensor, v: Tensor, pe: Tensor, **kwargs: Any) -> Tensor:
                seen[:] = apply_rope1(k, pe), v
                return attention(q, k, v, pe, **kwargs)

            def use(q: Tensor, k: Tensor, v: Tensor, pe: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
                out: Tensor = optimized_attention(
                    apply_rope1(q, pe), *seen, q.shape[1], skip_reshape=True, mask=mask, **kwargs
                )
                return out

            attention = layers.attention
            # Blocks write into what they are given.
            copied = {n: x.clone() if isinstance(x, Tensor) else x for n, x in whole.pop().items()}
            with replaced(layers, {"attention": watch}):
                called(self, by_place, copied)
            with replaced(layers, {"attention": use}):
                return called(self, by_place, given)

        return {"merged_call_args": noted, "_called": run}

    return picked(during(patch, lambda: pack_module("nodes.adapters.chain").BlockHook, values))


def guided(patch: Patch) -> Patch:
    """The pass with the prompt whole, and merged only what guidance adds to it: c + (g - 1)(c_m - u_m). Its work is
    half of the unmerged model's and all of the merged one's; here the other half is done too, and thrown away."""

    def patched(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        hooks = pack_module("nodes.adapters.model_hooks")

        def predict(executor: Any, x: Tensor, timestep: Tensor, model_options: dict[str, Any], *args: Any) -> Any:
            told = model_options["transformer_options"]
            if hooks.SAMPLING not in told:
                return executor(x, timestep, model_options, *args)
            plain = {k: v for k, v in told.items() if k not in (hooks.ATTACHMENT, hooks.SAMPLING)}

            def picture(options: dict[str, Any], combine: Callable[[dict[str, Any]], Tensor]) -> Tensor:
                given = {**model_options, "transformer_options": options, "sampler_cfg_function": combine}
                out: Tensor = executor(x, timestep, given, *args)
                return out

            whole = picture(plain, lambda given: given["cond"])
            added = picture(told, lambda given: (given["cond_scale"] - 1) * (given["cond"] - given["uncond"]))
            return whole + added - x

        model = patch(model.clone())
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "guided", predict)
        return model

    return patched
