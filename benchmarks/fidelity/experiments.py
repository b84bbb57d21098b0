"""Experiments that may become settings: each changes the pack during a sampling run."""

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
    """Wrap `patch`: while its model samples, attributes of an object of the pack are replaced.

    values: maps the original object to its new attributes.
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
    """Cache keys and values in four bits, as for larger models and videos."""
    return during(patch, lambda: pack_module("nodes.adapters.kv_memory"), lambda _: {"memory_left": lambda *_: 0})


def own_destinations(patch: Patch) -> Patch:
    """Select destinations for every condition separately."""

    def values(sampling: Any) -> dict[str, Any]:
        own = sampling.evaluation

        def evaluation(self: Any, *args: Any) -> Any:
            made = own(self, *args)
            return dataclasses.replace(made, plan_keys=made.cond_keys)

        return {"evaluation": evaluation}

    return during(patch, lambda: pack_module("nodes.adapters.patch_model").SamplingRun, values)


def centred(patch: Patch) -> Patch:
    """Compare tokens after subtracting the mean token of their image."""

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
    """Unmerge by the least-squares inverse of the merge instead of A^T."""

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
    """Compute M^+ = M^T (M M^T)^-1 per window: (B, W, K, S) fp32 -> (B, W, S, K).

    A small ridge bounds the result for nearly equal destinations. used: (W, K), the rows that are destinations; None if
    all are. The columns of the others are zeros.
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
    """Set the selection and weight intervals of the first and the second half of the steps."""

    def values(run: Any) -> dict[str, Any]:
        class Schedule(run.Schedule):  # type: ignore[name-defined, misc]
            def decide(self, sigma: float, step: int | None = None) -> Any:
                decision = super().decide(sigma, step)
                middle = len(self.sigmas) // 2
                # Generation numbers of the second half must differ from those of the first.
                age, (select, weigh) = (
                    (decision.step, early) if decision.step < middle else (decision.step - middle, late)
                )
                base = 0 if decision.step < middle else 1000
                return dataclasses.replace(decision, selection=base + age // select, weighing=base + age // weigh)

        return {"Schedule": Schedule}

    return during(patch, lambda: pack_module("nodes.adapters.sampling_run"), values)


def control_variate(ratio: float, every: int, attach: Callable[..., Patch]) -> Patch:
    """Use output = last full output + (merged output now - merged output at that full step), on the velocity.

    The model runs full and merged at every Nth step; at the others only merged.
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
                full = executor(x, timestep, {**model_options, "transformer_options": plain}, *args)
                Held.offset = (x - full) / sigma - merged
            Held.index += 1
            return x - sigma * (merged + Held.offset)

        model = attach(ratio=ratio)(model.clone())
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "variate", start)
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "variate", predict)
        return model

    return patch


def moved_budget(patch: Patch, most: float = 1.5) -> Patch:
    """Allocate the D destinations of an image to the windows with the largest gains, at most `most` times an equal
    share.

    Windows are independent, so the largest gains of all windows together are the greedy choice for the image.
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
            greedy = pack_module("toma_core.selection").greedy_facility_location
            largest = min(slots, round(most * budget.slots))
            order = greedy(similarity.flatten(0, 1), None, largest).view(batch, count, largest)
            best = similarity.gather(2, order[..., None].expand(-1, -1, -1, slots)).cummax(2).values.sum(-1)
            gains = torch.cat([torch.full_like(best[..., :1], torch.inf), best.diff(dim=-1)], -1)
            # The first destination of every window has an infinite gain, so every window has one.
            chosen = gains.flatten(1).topk(budget.total, dim=1).indices
            valid = torch.zeros(batch, count * largest, dtype=torch.bool).scatter(1, chosen, True)
            counts = valid.view(batch, count, largest).sum(-1, keepdim=True)
            valid = torch.arange(largest) < counts
            dest_slots = order.masked_fill(~valid, slots).sort(-1).values
            dest_slots = torch.where(dest_slots == slots, dest_slots[..., :1], dest_slots)
            compact = valid.flatten(1).nonzero()[:, 1].view(batch, -1)
            first = counts.cumsum(1) - counts
            expand = torch.where(valid, first + torch.arange(largest), first).flatten(1)
            own = pack_module("toma_core.windows").Budget(budget.counts, compact, expand, valid)
            return state.weigh(tokens, dest_slots, windows, own, config.sharpness, x.dtype)

        return {"_selected": selected}

    return during(patch, lambda: _state().RunState, values)


def through_frames(cut: Callable[..., Any], side: int) -> Callable[..., Any]:
    """Make windows of side x side tokens through all frames. cut: the pack's own `make_windows`, for one frame."""
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
    """Use windows through all frames of a clip instead of windows inside each frame. Frames then have different numbers
    of destinations, which requires a model without per-frame modulation."""
    return during(patch, _state, lambda state: {"make_windows": through_frames(state.make_windows, side)})


def picked(patch: Patch) -> Patch:
    """Pass blocks the destinations themselves instead of means of their tokens; with a residual cache this is the
    default."""

    def values(chain: Any) -> dict[str, Any]:
        own, pick = chain.reduce, pack_module("toma_core.merge").gather_destinations

        def reduce(x: Tensor, plan: Any, update: Any = None) -> Tensor:
            return own(x, plan, update) if plan is None or update is not None else pick(x, plan)

        return {"reduce": reduce}

    return during(patch, lambda: pack_module("nodes.adapters.active_chain"), values)


def norm_kept(patch: Patch) -> Patch:
    """Scale means of tokens to the norm of the tokens: the mean of different tokens is shorter than each of them."""

    def values(chain: Any) -> dict[str, Any]:
        own, merge = chain.reduce, pack_module("toma_core.merge").merge

        def reduce(x: Tensor, plan: Any, update: Any = None) -> Tensor:
            means = own(x, plan, update)
            if plan is None or update is not None:
                return means
            lengths = merge(x.norm(dim=-1, keepdim=True), plan)
            return means * (lengths / means.norm(dim=-1, keepdim=True).clamp_min(1e-6))

        return {"reduce": reduce}

    return during(patch, lambda: pack_module("nodes.adapters.active_chain"), values)


def exact(patch: Patch) -> Patch:
    """Pass destinations to a block unmerged, with the keys and values of all tokens. For Flux merged around each block.
    Keys and values come from an earlier full evaluation of the block, so this measures the error, not the cost: at 1024
    x 1024 it would be 0.61 of a Flux block's FLOPs at ratio 0.5, and 0.42 at 0.75."""

    def values(link: Any) -> dict[str, Any]:
        from comfy.ldm.flux import layers
        from comfy.ldm.flux.math import apply_rope1, optimized_attention

        merged, called = link._merged_outside, link._call_original
        full: list[dict[str, Any]] = []

        def noted(self: Any, by_place: int, given: dict[str, Any], before: int) -> Any:
            full[:] = [given]
            return merged(self, by_place, given, before)

        def run(self: Any, by_place: int, given: dict[str, Any]) -> Any:
            if not full:
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
            # Blocks change their input in place.
            copied = {n: x.clone() if isinstance(x, Tensor) else x for n, x in full.pop().items()}
            with replaced(layers, {"attention": watch}):
                called(self, by_place, copied)
            with replaced(layers, {"attention": use}):
                return called(self, by_place, given)

        return {"_merged_outside": noted, "_call_original": run}

    return picked(during(patch, lambda: pack_module("nodes.adapters.chain").BlockHook, values))


def guided(patch: Patch) -> Patch:
    """Evaluate the prompt unmerged and only the guidance merged: c + (g - 1)(c_m - u_m). The cost is half of the
    unmerged model plus the merged one; here the other half is computed too and discarded."""

    def patched(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        hooks = pack_module("nodes.adapters.model_hooks")

        def predict(executor: Any, x: Tensor, timestep: Tensor, model_options: dict[str, Any], *args: Any) -> Any:
            options = model_options["transformer_options"]
            if hooks.SAMPLING not in options:
                return executor(x, timestep, model_options, *args)
            plain = {k: v for k, v in options.items() if k not in (hooks.ATTACHMENT, hooks.SAMPLING)}

            def picture(options: dict[str, Any], combine: Callable[[dict[str, Any]], Tensor]) -> Tensor:
                given = {**model_options, "transformer_options": options, "sampler_cfg_function": combine}
                out: Tensor = executor(x, timestep, given, *args)
                return out

            full = picture(plain, lambda given: given["cond"])
            added = picture(options, lambda given: (given["cond_scale"] - 1) * (given["cond"] - given["uncond"]))
            return full + added - x

        model = patch(model.clone())
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "guided", predict)
        return model

    return patched
