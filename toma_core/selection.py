"""Select the destinations of each window by a greedy search for the facility-location objective (paper, section 4.1).
Windows in which tokens vary much get more destinations (`allocate`); the paper has no such adaptive budgets.

f(A) = sum over tokens i of max over destinations j in A of (1 + cos(x_i, x_j)). The 1 makes every term non-negative,
so that f is monotone and submodular with f(empty) = 0, as the (1 - 1/e) bound of greedy search needs. The 1 does not
change which set is best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Budget, Windows

# The gain of a window's token n is reduced by n times this penalty. Late in a search, two tokens that represent only
# each other have equal gains. Without the penalty rounding would decide between them, and rounding depends on batch,
# threads and kernel. The penalty is far above rounding and far below true differences of gains.
TIE = 1e-5
# Priority of the last step's destinations if cached keys, values and updates are propagated; all other tokens have
# priority 1. So tokens take turns at being computed (benchmarks/results/fidelity/trials.md).
RECENT = 0.25
# The most elements of tokens that are held in fp32 at a time: with intermediates 1 GB. Flux's tokens at 2048 x 2048
# have 50 million.
MAX_ELEMENTS = 1 << 26
_MIN_SPREAD = 1e-5  # a variance below this is a rounding error, in any dtype


def select(similarity: Tensor, windows: Windows, budget: Budget, priority: Tensor | None = None) -> Tensor:
    """Return the slots of destinations that represent each window's tokens best, (B, W, K) int64. Slots ascend within a
    window, so that merged tokens keep the reading order. Unused slots of the budget repeat the window's first slot.

    similarity: (B, W, S, S) fp32 from `cosine_similarity`. priority: (B, N) fp32, see `greedy_facility_location`.
    """
    valid = None if windows.valid is None else windows.valid.repeat(similarity.shape[0], 1)
    factors = None if priority is None else windows.split(priority[..., None]).flatten(0, 1).squeeze(2)
    slots = greedy_facility_location(similarity.flatten(0, 1), valid, budget.slots, factors)
    return in_reading_order(slots.view(*similarity.shape[:2], budget.slots), windows, budget)


def in_reading_order(dest_slots: Tensor, windows: Windows, budget: Budget) -> Tensor:
    """Put slots, (B, W, K), best first, in ascending order. A window with a budget below K keeps its best slots."""
    if budget.valid is None:
        return dest_slots.sort(-1).values
    dest_slots = dest_slots.masked_fill(~budget.valid, windows.slots).sort(-1).values
    return torch.where(dest_slots == windows.slots, dest_slots[..., :1], dest_slots)


def greedy_facility_location(
    similarity: Tensor, valid: Tensor | None, number: int, priority: Tensor | None = None
) -> Tensor:
    """Return, for every window, the first `number` slots that a greedy search picks, best first: (G, number) int64.

    similarity: (G, S, S) fp32, S_ij = cos(x_i, x_j); valid: (G, S) bool, False in padding slots, None without padding.
    priority: (G, S) fp32 in (0, 1], the factor of each slot's gain. If the smallest factor is p, the search reaches at
    least 1 - e^-p of the optimum. A window with fewer valid slots than `number` repeats a slot at the end. Ties go to
    the lowest slot, see `tie_step`. The host does not wait for the device.
    """
    slots = similarity.shape[1]
    slot = torch.arange(slots, dtype=similarity.dtype, device=similarity.device)
    penalty = (-tie_step(slots) * slot).expand(similarity.shape[:2])
    if valid is not None:
        # Padding tokens add nothing to any gain, and are never picked.
        similarity = similarity.masked_fill(~valid[:, :, None], -1.0)
        penalty = penalty.masked_fill(~valid, -torch.inf)
    # m_i, the max of S_ij over picked j, says how well token i is represented. At first m_i is -1, the smallest cosine.
    m = similarity.new_full(similarity.shape[:2], -1.0)
    order = []
    for _ in range(number):
        gain = (similarity - m[:, :, None]).relu_().sum(1)  # of each j: sum_i relu(S_ij - m_i), never negative
        if priority is not None:
            gain = gain * priority
        pick = (gain + penalty).argmax(1)
        order.append(pick)
        penalty = penalty.scatter(1, pick[:, None], -1.0)  # below any slot that is not picked
        m = torch.maximum(m, similarity.gather(2, pick[:, None, None].expand(-1, slots, 1)).squeeze(2))
    return torch.stack(order, 1)


def tie_step(slots: int) -> float:
    """Return the difference between the penalties on the gains of neighbouring slots. Penalties grow to at most 256 *
    TIE over a window, so that large windows do not prefer their first slots."""
    return TIE * min(1.0, 256 / slots)


def in_parts(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Return function(x, *others), called for some windows at a time if x is large. All tensors: (B, W, ...)."""
    parts = min(-(-x.numel() // MAX_ELEMENTS), x.shape[0] * x.shape[1])
    if parts < 2:
        return function(x, *others)
    pieces = zip(*(t.flatten(0, 1).tensor_split(parts) for t in (x, *others)), strict=True)
    return torch.cat([function(*piece) for piece in pieces]).unflatten(0, x.shape[:2])


def normalized(x: Tensor) -> Tensor:
    """Return x / |x| along the last dimension in fp32; an all-zero token stays zero."""
    return F.normalize(x.float(), dim=-1, eps=1e-12)


def cosine_similarity(x: Tensor, dest_slots: Tensor | None = None) -> Tensor:
    """Return S_ij = cos(x_i, x_j), (..., S, S) fp32, or only the rows of S for given slots, (..., K, S). x: (..., S,
    C), any float dtype; dest_slots: (..., K) int64. Cosines of tokens that hold NaN or infinity are 0, because NaN
    gains would make the search pick a slot twice."""
    rows = x = normalized(x)
    if dest_slots is not None:
        rows = x.gather(-2, dest_slots[..., None].expand(*dest_slots.shape, x.shape[-1]))
    return (rows @ x.mT).nan_to_num_(nan=0.0)


def spread(x: Tensor, windows: Windows) -> Tensor:
    """Return the variance of token directions in each window, from 0 (all directions equal) to 1: (B, W) fp32. x: (B,
    W, S, C) in window layout, any float dtype."""
    if windows.valid is None:
        return in_parts(_spread, x)
    share = windows.valid / windows.valid.sum(1, keepdim=True)
    return in_parts(_spread, x, share.expand(len(x), -1, -1))


def _spread(x: Tensor, share: Tensor | None = None) -> Tensor:
    x = normalized(x).nan_to_num_(nan=0.0)
    mean = x.mean(-2) if share is None else (x * share[..., None]).sum(-2)
    return 1 - mean.pow(2).sum(-1)


def allocate(budget: Budget, spread: Tensor, windows: Windows, by_latents: bool = False) -> Budget:
    """Return a budget with the same total as `budget` that gives more destinations to windows of larger spread.

    spread: (B, W), from the function `spread`. Destinations per token are proportional to the square root of the
    spread: this gives quantisation in two dimensions the least error (Zador 1982). by_latents: whether cached tensors
    are propagated by the change of the latent. Destinations per token are then proportional to the spread itself: in
    windows of low spread, the latent usually explains most of the change of cached tensors. A window gets at least one
    destination and at most as many as it has tokens. Each frame of a video keeps its number of destinations. The host
    does not wait for the device.
    """
    device, frames = spread.device, windows.frames
    images, total = len(spread), budget.total // frames
    spread = spread.reshape(images * frames, -1)  # (B * frames, windows of a frame)
    # K is the most destinations that one window can get, because every other window keeps at least one.
    K = min(windows.slots, total - spread.shape[1] + 1)
    rank = torch.arange(K, device=device)
    sizes = windows.valid.sum(1) if windows.valid is not None else torch.full_like(windows.source[:, 0], windows.slots)
    sizes = sizes[: spread.shape[1]]
    density = spread.clamp_min(_MIN_SPREAD)
    due = (density if by_latents else density.sqrt()) * sizes
    claims = due[..., None] / (rank + 0.5)
    claims = claims.masked_fill(rank >= sizes[:, None], -1.0).masked_fill(rank == 0, torch.inf)
    # Give one destination to each of the largest claims; the stable sort orders equal claims alike on every device.
    chosen = claims.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :total]
    taken = torch.zeros(claims.shape, dtype=torch.bool, device=device).flatten(1).scatter_(1, chosen, True)
    return Budget.of(budget.counts, taken.view(images, -1, K).sum(-1, keepdim=True), rank)
