"""Test models with blocks, loops or PyTorch hooks of other packs: code of other packs never receives merged tokens."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Reason = pack_module("toma_core.reasons").Reason

SIZE = 20, 28
LISTS = {
    "flux": "double_blocks", "z_image": "layers", "krea2": "blocks", "qwen_image": "transformer_blocks",
    "unet": "middle_block.1.transformer_blocks",
}  # fmt: skip


def tokens_in(*given: Any) -> int:
    """Return the number of image tokens in a block's arguments or results: the length of the longest stream."""
    return max(x.shape[1] for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.ndim == 3)


class Own(nn.Module):
    """A block of another pack that uses the weights of a block of ComfyUI. seen: the number of tokens in each call."""

    def __init__(self, block: nn.Module, seen: list[int]) -> None:
        super().__init__()
        self.block, self.seen = [block], seen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(tokens_in(args, kwargs))
        return type(self.block[0]).forward(self.block[0], *args, **kwargs)


def sample(model: Any, steps: int = 1) -> torch.Tensor:
    return models.sample(model, *SIZE, steps=steps, cfg=1.0)


def block_of(model: Any, family: str, place: int) -> tuple[str, nn.Module]:
    """Return a block's name for `add_object_patch`, and the block."""
    blocks = f"diffusion_model.{LISTS[family]}"
    place %= len(model.get_model_object(blocks))
    return f"{blocks}.{place}", model.get_model_object(f"{blocks}.{place}")


@loop("family", LISTS)
@loop("place", [0, 1, -1])
def test_a_replaced_block_is_not_merged(family: str, place: int, attach: Any, stats_of: Any) -> None:
    """One chain ends before the replaced block, another begins behind it. A model with ComfyUI's own block is merged as
    before."""
    model, seen, all_tokens = getattr(models, family)(), list[int](), list[int]()
    name, block = block_of(model, family, place)
    merged = attach(model)
    foreign, plain = merged.clone(), model.clone()
    foreign.add_object_patch(name, Own(block, seen))
    plain.add_object_patch(name, Own(block, all_tokens))
    sample(plain)
    assert sample(foreign).isfinite().all()
    assert seen == all_tokens
    stats = stats_of(foreign)
    (left,) = stats.unmerged_names()[Reason.BLOCK_REPLACED()]
    assert left.endswith(name[-2:])
    assert len(stats.merged_blocks) == len(stats.blocks) - 1
    again = sample(attach(model))
    assert torch.equal(sample(merged), again)
    assert stats_of(merged).unmerged == {}


@loop("what", ["wrapped", "shorter"])
def test_a_list_of_blocks_that_is_replaced(what: str, attach: Any, stats_of: Any) -> None:
    model = models.flux()
    blocks = model.model.diffusion_model.double_blocks
    merged = attach(model).clone()
    seen: list[int] = []
    replaced = [Own(block, seen) for block in blocks] if what == "wrapped" else list(blocks)[:1]
    merged.add_object_patch("diffusion_model.double_blocks", nn.ModuleList(replaced))
    assert sample(merged).isfinite().all()
    assert len(set(seen)) <= 1
    assert len(stats_of(merged).unmerged[Reason.BLOCK_REPLACED()]) == len(blocks)
    assert all(name.startswith("single") for name in stats_of(merged).merged_blocks)


def test_hooks_made_while_blocks_are_replaced_do_not_keep_them(attach: Any, stats_of: Any) -> None:
    """When ToMA first inspects the model, another node's blocks still replace the model's own."""
    model = models.flux()
    replaced = model.clone()
    for place in range(3):
        name, block = block_of(model, "flux", place)
        replaced.add_object_patch(name, Own(block, []))
    sample(replaced)
    merged = attach(model)
    out = sample(merged)
    assert stats_of(merged).unmerged == {}
    assert torch.equal(out, sample(attach(models.flux())))


@loop("where", ["class", "subclass", "object"])
def test_another_packs_loop_sees_all_tokens(where: str, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.flux()
    network = model.model.diffusion_model
    own: Callable[..., Any] = type(network).forward_orig
    seen: list[int] = []

    def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        looked = lambda _, __, out: seen.append(tokens_in(out))  # noqa: E731
        handles = [block.register_forward_hook(looked) for block in self.double_blocks]
        out = own(self, *args, **kwargs)
        for handle in handles:
            handle.remove()
        return out

    if where == "class":
        monkeypatch.setattr(type(network), "forward_orig", loop)
    elif where == "subclass":
        monkeypatch.setattr(network, "__class__", type("Sub", (type(network),), {"forward_orig": loop}))
    else:
        network.forward_orig = types.MethodType(loop, network)
    sample(attach(model))
    assert len(set(seen)) == 1


@loop("kind", ["unet", "flux"])
@loop("before", [False, True])
def test_hooks_of_pytorch_see_all_tokens(kind: str, before: bool, attach: Any) -> None:
    model, seen = getattr(models, kind)(), list[int]()
    _, block = block_of(model, kind, int(before))
    if before:
        block.register_forward_pre_hook(lambda _, *given: seen.append(tokens_in(given)), with_kwargs=True)
    else:
        block.register_forward_hook(lambda _, __, out: seen.append(tokens_in(out)))
    sample(model)
    sample(attach(model))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] != []


def test_the_measured_number_of_blocks_is_of_flux_1(pack: Any) -> None:
    """Preset `paper` skips 5 blocks in Flux.1. In models with fewer double blocks it skips a tenth of the blocks."""
    find, core = pack_module("nodes.adapters.registry").find, pack_module("toma_core")
    small, flux_1 = (find(models.flux(double=d, single=s).model.diffusion_model) for d, s in ((2, 3), (19, 38)))
    skipped = [
        core.UserSettings("paper").resolved(hooks.kind, hooks.own_presets).skip_first_blocks
        for hooks in (small, flux_1)
    ]
    assert skipped == [0.1, 5]


@loop(("tokens", "start"), [(140 + 5, 0), (7 + 140 + 5, 7), (140, None)])
def test_a_stream_without_positions_may_end_with_the_image(tokens: int, start: int | None) -> None:
    signature = pack_module("nodes.adapters.signature").BlockSignature()
    signature.image_last = True
    given = {"x": torch.empty(2, tokens, 8), "transformer_options": {"reference_image_num_tokens": [5]}}
    assert signature.image_start(given, 140) == start


def test_tokens_that_a_patch_appends_are_not_the_image() -> None:
    """Krea 2 has text tokens before the image tokens. A patch has appended five tokens behind the image tokens."""
    given = {"freqs": torch.empty(1, 1, 7 + 140 + 5, 4, 2, 2), "transformer_options": {"img_slice": [7, 152]}}
    assert pack_module("nodes.adapters.families.krea").Signature().image_start(given, 140) == 7
