"""The checks that every row passes.

1. If ToMA is idle (nothing to merge) or off (outside of its steps), the result is bit-identical to that of the feature
without ToMA, whichever node comes first.
2. With ToMA on, the result is finite, has the shape of the result without ToMA, and does not depend on the order of the
   nodes. The report names the merged and the unmerged parts that the row expects.
3. The feature still acts: it changes the latent in about the same direction with and without merging.
4. The model is unchanged after all runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed.selectors import selected_by

from .kit import PRESET, Kit
from .row import Expected, Graph, NotFor, Refused, Row

# Settings that merge all grids and blocks of small models.
EVERYTHING = {"min_tokens": 4, "skip_first_blocks": 0, "skip_last_blocks": 0}
# Attributes that hold the blocks of a transformer. UNets have none of these attributes, but stacks of blocks.
_LISTS = ("double_blocks", "single_blocks", "layers", "blocks", "transformer_blocks", "joint_blocks")
# Settings that merge nothing. In the first half of the steps the hooks are in place, but every grid is too small. In
# the second half ToMA is off.
NEVER = {"min_tokens": 1_048_576, "end_percent": 0.5}
# The minimum cosine between a feature's changes of the latent with and without merging. Unrelated changes of these
# latents have a cosine between -0.1 and 0.1.
FOLLOWED = 0.3


@dataclass(frozen=True)
class Verdict:
    """The verdict on a row for one family: its cell in the table, and the unmerged parts by reason."""

    cell: str
    unmerged: Mapping[str, str]


def judge(row: Row, kit: Kit) -> Verdict:
    """Run a row on one family. Raises AssertionError with the check that fails."""
    expected = row.expected[kit.name]
    if isinstance(expected, NotFor):
        return Verdict(expected.why, {})
    left: dict[str, set[Any]] = {}
    graphs = row.graphs(kit)
    before: dict[int, tuple[Any, Tensor]] = {}
    for graph in graphs:
        model = kit.model if graph.model is None else graph.model
        if id(model) not in before:
            before[id(model)] = model, kit.sample(model)
        if isinstance(expected, Refused):
            _refused(graph, kit, expected.error)
        else:
            for reason, parts in Trial(graph, kit, expected).passes().items():
                left.setdefault(str(reason), set()).update(parts)
    for model, plain in before.values():
        assert same(kit.sample(model), plain), "the model is not as it was"
        assert not hooked(model), f"hooks were left in the model: {hooked(model)}"
    if isinstance(expected, Refused):
        return Verdict(f"not in ComfyUI ({expected.error.__name__})", {})
    cell = "unmerged" if not expected.merged else "merged in part" if left else "merged"
    cell += f" ({len(graphs)})" * (len(graphs) > 1)
    return Verdict(cell, {reason: _described(parts) for reason, parts in sorted(left.items())})


def _refused(graph: Graph, kit: Kit, error: type[Exception]) -> None:
    """Check that ComfyUI raises this error both without and with ToMA."""
    for model in (kit.model, attach(kit.model, **graph.settings)):
        try:
            graph.run(kit, graph.patch(model))
        except error:
            continue
        raise AssertionError(f"{graph.name}: ComfyUI was expected to raise {error.__name__}")


class Trial:
    """The checks of one graph."""

    def __init__(self, graph: Graph, kit: Kit, expected: Expected) -> None:
        self.graph, self.kit, self.expected = graph, kit, expected
        self.base = kit.model if graph.model is None else graph.model

    def run(self, graph: Graph, model: Any) -> Tensor:
        """Sample with a fixed seed, and with PyTorch's global generator seeded."""
        torch.manual_seed(0)
        return graph.run(self.kit, model)

    def toma(self, model: Any, **settings: Any) -> Any:
        """Apply ToMA to a model, with the graph's settings and `settings`."""
        return attach(model, **{**self.graph.settings, **settings})

    def orders(self, **settings: Any) -> list[Any]:
        """Return the model with ToMA's node after the feature's node. If the feature patches the model, also return the
        model with ToMA's node before the feature's."""
        patch = self.graph.patch
        last = self.toma(patch(self.base), **settings)
        return [last, patch(self.toma(self.base, **settings))] if self.graph.patches else [last]

    def passes(self) -> Mapping[Any, set[str]]:
        """Run all checks of the graph, and return the unmerged parts by reason."""
        graph = self.graph
        alone = self.run(graph, graph.patch(self.base))
        self.demand(alone.isfinite().all(), "the feature alone gives no finite result")
        for model in self.orders(**NEVER):
            self.demand(same(self.run(graph, model), alone), "merging nothing differs from running without ToMA")

        last, *first = self.orders()
        result = self.run(graph, last)
        report = stats_of(last)
        self.demand(result.shape == alone.shape, f"the shape is {tuple(result.shape)}, not {tuple(alone.shape)}")
        self.demand(result.isfinite().all(), "not finite")
        self.is_reported(report)
        self.demand(
            same(result, alone) is not self.expected.merged,
            "the result must differ from that without ToMA exactly if tokens are merged",
        )
        for model in first:
            self.demand(same(result, self.run(graph, model)), "the order of the nodes matters")
        # Skip the graph's check under a preset. The check assumes that the first step is merged, but presets make it
        # full.
        if graph.check is not None and not PRESET:
            graph.check(result)
        if graph.same_as is not None:
            toma = self.run(Graph(options=graph.options), self.toma(self.base, **graph.same_as))
            self.demand(same(result, toma), f"differs from ToMA alone with {graph.same_as}")
        elif graph.steered and self.expected.merged:
            self.is_followed(result, alone)
        return report.unmerged

    def is_reported(self, report: Any) -> None:
        """Check that the report names the merged blocks, and every reason for unmerged blocks."""
        parts: dict[str, int] = {}
        for reason, names in report.unmerged.items():
            parts[reason.id.value] = parts.get(reason.id.value, 0) + len(names)
        for reason in report.unmerged_calls:
            parts[reason.id.value] = parts.get(reason.id.value, 0) + 1
        self.demand(
            parts == dict(self.expected.unmerged), f"not merged: {parts}, expected: {dict(self.expected.unmerged)}"
        )
        report_text = pack_module("nodes.adapters.report_text")
        text = report_text.summary(report)
        self.demand(
            all(str(reason) in text for reason in (*report.unmerged, *report.unmerged_calls)),
            "a reason is not in the report",
        )
        if self.expected.merged:
            merged, blocks = len(report.merged_blocks), blocks_of(self.base)
            self.demand(merged == blocks, f"only {merged} of {blocks} blocks were merged: {text}")
        else:
            self.demand(not report.merged_blocks, f"merged after all: {sorted(report.merged_blocks)}")
            self.demand(
                report_text.headline(report).id.value == "nothing_merged",
                "the report does not say that nothing was merged",
            )

    def is_followed(self, result: Tensor, alone: Tensor) -> None:
        """Check that the feature changes the latent in about the same direction with and without merging."""
        without = self.graph.without or Graph(options=self.graph.options)
        model = self.toma(without.patch(self.base))
        merged = self.run(without, model)
        if self.graph.off:
            toma = self.run(Graph(options=without.options), self.toma(self.base))
            self.demand(same(merged, toma), "turned off, it differs from ToMA alone")
        change, change_alone = result - merged, alone - self.run(without, without.patch(self.base))
        self.demand(change_alone.any(), "the feature does nothing even without ToMA")
        cosine = torch.nn.functional.cosine_similarity(change.flatten(), change_alone.flatten(), 0)
        self.demand(cosine > FOLLOWED, f"its change differs from that without ToMA: cosine {cosine:.2f}")

    def demand(self, held: Any, otherwise: str) -> None:
        """Raise an AssertionError that names the graph, unless `held` is true."""
        if not held:
            raise AssertionError(": ".join(filter(None, (self.graph.name, otherwise))))


def attach(model: Any, *, selector: str = "", **settings: Any) -> Any:
    """Apply ToMA to a model, by default on every grid and in every block. selector: the rule of `testbed.selectors`
    that selects destinations, "" for ToMA's own selection."""
    core, chosen = pack_module("toma_core"), {**EVERYTHING, **settings}
    made = core.UserSettings(PRESET, chosen) if PRESET else core.ToMAConfig(**chosen)

    def patch(model: Any) -> Any:
        return pack_module("nodes.adapters.patch_model").apply_toma(model, made)

    return (selected_by(patch, selector) if selector else patch)(model)


def stats_of(model: Any) -> Any:
    """Return the stats of a model's last run."""
    stats = pack_module("nodes.adapters.attachment").last_stats(model)
    assert stats is not None, "no run was reported"
    return stats


def blocks_of(model: Any) -> int:
    """Count the transformer blocks of a model."""
    from comfy.ldm.modules.attention import BasicTransformerBlock

    network = model.model.diffusion_model
    lists = [getattr(network, name, ()) for name in _LISTS]
    return sum(map(len, lists)) or sum(isinstance(module, BasicTransformerBlock) for module in network.modules())


def hooked(model: Any) -> list[str]:
    """Return the names of modules whose instance overrides `forward`."""
    return [name for name, module in model.model.diffusion_model.named_modules() if "forward" in vars(module)]


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are bit-identical."""
    return torch.equal(a, b)


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, which depends on batch size and order of summation."""
    return bool((a - b).norm() <= 1e-5 * b.norm())


def _described(unmerged: set[Any]) -> str:
    """Summarise unmerged parts by number of blocks, as in `self-attention of 2 blocks, 3 blocks`."""
    counts: dict[str, int] = {}
    for _, part in sorted(unmerged, key=lambda names: " ".join(filter(None, names))):
        counts[part] = counts.get(part, 0) + 1
    words = []
    for kind, count in counts.items():
        blocks = f"{count} block{'s' * (count > 1)}"
        words.append(f"{kind} of {blocks}" if kind else blocks)
    return ", ".join(words)
