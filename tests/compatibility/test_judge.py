"""Test that each check of `compatibility.judge` detects the fault that it is for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compatibility.judge import Verdict, judge
from compatibility.kit import AbsentError, Kit, node
from compatibility.row import MERGED, Expected, Graph, NotFor, Refused, Row, unmerged


@pytest.fixture(scope="module")
def kit(pack: Any) -> Kit:
    return Kit("flux")


def verdict(kit: Kit, graph: Graph, expected: Any = MERGED) -> Verdict:
    return judge(Row("feature", "group", lambda _: graph, {"flux": expected}), kit)


def after_cfg(change: Callable[[dict[str, Any]], Tensor]) -> Callable[[Any], Any]:
    """Return a node that applies `change` to the result of guidance."""

    def patch(model: Any) -> Any:
        model = model.clone()
        model.set_model_sampler_post_cfg_function(change)
        return model

    return patch


def brighter(args: dict[str, Any]) -> Tensor:
    return args["denoised"] + 1.0


def test_what_holds_passes(kit: Kit) -> None:
    assert verdict(kit, changed(brighter)) == Verdict("merged", {})
    assert verdict(kit, Graph(), NotFor("for others")) == Verdict("for others", {})
    graphs = [Graph(steered=False, name=str(i)) for i in range(2)]
    assert judge(Row("feature", "group", lambda _: iter(graphs), {"flux": MERGED}), kit).cell == "merged (2)"


def merging(args: dict[str, Any]) -> bool:
    sampling = args["model_options"]["transformer_options"].get("toma_sampling")
    return sampling is not None and bool(sampling.run.stats.merged_blocks)


def minding_the_order(model: Any) -> Any:
    factor = 1.1 if "toma" in model.model_options["transformer_options"] else 1.2
    return after_cfg(lambda args: args["denoised"] * (factor if merging(args) else 1.0))(model)


def never(result: Tensor) -> None:
    raise AssertionError("the check ran")


def changed(change: Callable[[dict[str, Any]], Tensor], **more: Any) -> Graph:
    return Graph(after_cfg(change), **more)


SEES_TOMA = "merging nothing differs from running without ToMA"


@pytest.mark.parametrize(
    ("graph", "expected", "complaint"),
    [
        (changed(brighter), Expected(unmerged={"no such reason": 1}), "not merged: {}, expected"),
        (changed(brighter), unmerged("no such reason", 6), "not merged: {}, expected"),
        (changed(brighter), Expected(merged=False), "merged after all"),
        (changed(brighter), Refused(KeyError), "was expected to raise KeyError"),
        (changed(lambda a: a["denoised"] + ("toma" in a["model_options"]["transformer_options"])), MERGED, SEES_TOMA),
        (changed(lambda a: a["denoised"] * float("nan")), MERGED, "the feature alone gives no finite result"),
        (changed(lambda a: a["denoised"] * (float("nan") if merging(a) else 1.0)), MERGED, "not finite"),
        (changed(lambda a: a["denoised"] + (-1.0 if merging(a) else 1.0)), MERGED, "its change differs from that with"),
        (changed(lambda a: a["denoised"]), MERGED, "does nothing even without ToMA"),
        (Graph(minding_the_order, steered=False), MERGED, "the order of the nodes matters"),
        (changed(brighter, steered=False, check=never), MERGED, "the check ran"),
        (changed(brighter, same_as={}, name="this one"), MERGED, "this one: differs from ToMA alone"),
    ],
)
def test_each_fault_is_found(graph: Graph, expected: Any, complaint: str, kit: Kit) -> None:
    with pytest.raises(AssertionError, match=complaint):
        verdict(kit, graph, expected)


def test_a_model_left_otherwise_than_it_was(kit: Kit) -> None:
    own = kit.build()

    def patch(model: Any) -> Any:
        with torch.no_grad():
            own.model.diffusion_model.img_in.bias += 0.0 if hasattr(own, "spoilt") else 0.5
        own.spoilt = True
        return after_cfg(brighter)(model)

    with pytest.raises(AssertionError, match="the model is not as it was"):
        verdict(kit, Graph(patch, model=own, steered=False))


@pytest.mark.parametrize("path", ["nodes_freelunch.NoSuchNode", "nodes_no_such_module.Node", "nodes.NoSuchNode"])
def test_absent_nodes_are_named(kit: Kit, path: str) -> None:
    with pytest.raises(AbsentError, match="this ComfyUI has no"):
        node(path)
