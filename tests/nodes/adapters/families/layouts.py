"""Provide expected results for tests: the layout of the blocks' arguments in every family, and merged blocks computed
by plain indexing."""

import importlib
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scripts import comfyui

HEIGHT, WIDTH, TEXT = 20, 28, 7


@dataclass(frozen=True)
class Layout:
    """Name and describe the arguments of a model's blocks. Layouts are written by hand from ComfyUI's source,
    independently of the adapters.

    blocks: attribute of the model that holds the list of blocks.
    tokens: argument with the image tokens.
    names: names of the positional arguments, if the signature of `forward` does not name them.
    before: number of tokens before the image in the argument `tokens`.
    rope_arg, rope_token_dim: argument with the positions, and its axis of tokens.
    above, below: number of positions of other tokens, such as text, before and behind those of `tokens`.
    keys: argument with the attention mask over keys, of which the image's keys are the first.
    out: index of the image tokens in the block's results.
    patch: side of a token in latent pixels.
    rows: arguments, besides tokens and positions, that have a row for each token.
    pairs: whether arguments and results are pairs whose first element is the image.
    flat: whether tokens lack a batch axis.
    grid: whether tokens are (B, frames, height, width, C).
    """

    blocks: str
    tokens: str
    names: tuple[str, ...] = ()
    before: int = 0
    rope_arg: str = ""
    rope_token_dim: int = 2
    above: int = 0
    below: int = 0
    keys: str = ""
    out: int | None = None
    patch: int = 2
    rows: tuple[str, ...] = ()
    pairs: bool = False
    flat: bool = False
    grid: bool = False

    def taken(self, value: Any) -> Tensor:
        """Return the tokens in an argument or result of the block, as (B, T, C)."""
        value = value if self.out is None or not isinstance(value, tuple) else value[self.out]
        value = value[0] if self.pairs and isinstance(value, tuple) else value
        value = value.flatten(1, 3) if self.grid and value.ndim == 5 else value
        return value[None] if self.flat and value.ndim == 2 else value

    def given(self, like: Any, tensor: Tensor) -> Any:
        """Bring `tensor`, tokens as (B, T, C), into the form of the block's argument `like`."""
        if self.pairs and isinstance(like, tuple):
            return (tensor, *like[1:])
        if self.grid and like.ndim == 5:
            return tensor[:, None, None]
        return tensor[0] if self.flat and like.ndim == 2 else tensor


DOUBLE = Layout("double_blocks", "img", rope_arg="pe", above=TEXT, out=0)
SINGLE = Layout("single_blocks", "x", rope_arg="pe", before=TEXT)
LAYOUTS = {
    "flux": (DOUBLE, SINGLE),
    # Flux.2's text is padded to 512 tokens.
    "flux2": (
        Layout("double_blocks", "img", rope_arg="pe", above=512, out=0, patch=1),
        Layout("single_blocks", "x", rope_arg="pe", before=512, patch=1),
    ),
    "chroma": (DOUBLE, SINGLE),
    "z_image": (Layout("layers", "x", rope_arg="freqs_cis", rope_token_dim=1, before=32),),
    "lumina2": (Layout("layers", "x", rope_arg="freqs_cis", rope_token_dim=1, before=TEXT),),
    "omnigen2": (Layout("layers", "hidden_states", rope_arg="image_rotary_emb", rope_token_dim=1, before=TEXT),),
    "krea2": (Layout("blocks", "x", rope_arg="freqs", before=TEXT),),
    "qwen_image": (Layout("transformer_blocks", "hidden_states", rope_arg="image_rotary_emb", above=TEXT, out=1),),
    "qwen_image21": (Layout("transformer_blocks", "x", rope_arg="pe", rope_token_dim=1, before=TEXT, patch=1),),
    "ernie": (Layout("layers", "x", rope_arg="rotary_pos_emb", rope_token_dim=1, patch=1),),
    "ideogram": (Layout("layers", "x", rope_arg="freqs_cis", rope_token_dim=1, before=TEXT, patch=1),),
    "lens": (
        Layout(
            "transformer_blocks",
            "hidden_states",
            rope_arg="freqs_cis",
            below=TEXT,
            out=1,
            patch=1,
            keys="attention_mask",
        ),
    ),
    "sd3": (Layout("joint_blocks", "x", names=("context", "x"), above=TEXT, out=1),),
    # The families below sample videos. A picture is a video of a single frame.
    "cosmos": (Layout("blocks", "x_B_T_H_W_D", rope_arg="rope_emb_L_1_1_D", rope_token_dim=1, grid=True),),
    "wan": (Layout("blocks", "x", rope_arg="freqs", rope_token_dim=1),),
    "hunyuan": (replace(DOUBLE, patch=1), replace(SINGLE, patch=1)),
    "ltx": (Layout("transformer_blocks", "x", rope_arg="pe", rope_token_dim=1, patch=1, pairs=True),),
    "ltx_av": (
        Layout("transformer_blocks", "x", rope_arg="v_pe", rope_token_dim=1, patch=1, rows=("v_cross_pe",), pairs=True),
    ),
    # The text and two channels of five audio tokens come before the video.
    "h3": (Layout("blocks", "x", rope_arg="rope_freqs", rope_token_dim=1, before=TEXT + 10, flat=True),),
}
# Families that cannot sample a batch of several latents.
ALONE = ("h3",)
# Settings that make every plan from the picture that the previous step predicted.
PREDICTED: dict[str, Any] = {
    "selection_interval": 1, "weight_interval": 1, "kv_cache": True, "full_step_interval": 9,
}  # fmt: skip


def current() -> bool:
    """Return whether the tests run with the default ComfyUI release, which has all families."""
    return bool(importlib.import_module("comfyui_version").__version__ == comfyui.DEFAULT_RELEASE)


def grid_of(layout: Layout, height: int = HEIGHT, width: int = WIDTH, frames: int = 1) -> tuple[int, ...]:
    sides = -(-height // layout.patch), -(-width // layout.patch)
    return sides if frames == 1 else (frames, *sides)


def arguments(block: nn.Module, layout: Layout, call: Any) -> dict[str, Any]:
    names = layout.names or tuple(inspect.signature(type(block).forward).parameters)[1:]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def merged_call(
    layout: Layout, given: dict[str, Any], plans: list[Any], M: Tensor
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return three things: the block's arguments after merging; the tokens of the image and of its references before
    merging; the same tokens after merging.

    plans: the image's plan, then the plans of merged references. M: one merge matrix for all these plans.
    """
    x, tokens = layout.taken(given[layout.tokens]), sum(plan.tokens for plan in plans)
    image = x[:, layout.before : layout.before + tokens]
    merged = M @ image
    stream = torch.cat([x[:, : layout.before], merged, x[:, layout.before + tokens :]], 1)
    merged_args = {**given, layout.tokens: layout.given(given[layout.tokens], stream.clone())}
    for name in (layout.rope_arg, *layout.rows) if layout.rope_arg else ():
        rows, start = layout.taken(given[name]), layout.before + layout.above
        assert rows.shape[layout.rope_token_dim] == layout.above + x.shape[1] + layout.below
        end = rows.shape[layout.rope_token_dim]
        each = []
        for b in range(len(x)):
            index, at = list(range(start)), start
            for plan in plans:
                index += (at + plan.destinations[b]).tolist()
                at += plan.tokens
            index += range(at, end)
            own = rows[min(b, len(rows) - 1)]
            each.append(own.index_select(layout.rope_token_dim - 1, torch.tensor(index)))
        merged_args[name] = layout.given(given[name], torch.stack(each))
    if layout.keys:
        merged_args[layout.keys] = given[layout.keys][..., tokens - merged.shape[1] :]
    return merged_args, image, merged


def restored(layout: Layout, out: Any, image: Tensor, merged: Tensor, U: Tensor) -> Tensor:
    """Return all tokens after a block whose output on merged tokens is `out`."""
    y = layout.taken(out)
    length = merged.shape[1]
    new = image + U @ (y[:, layout.before : layout.before + length] - merged)
    return torch.cat([y[:, : layout.before], new, y[:, layout.before + length :]], 1)


def run(block: nn.Module, layout: Layout, given: dict[str, Any]) -> Any:
    copies = {name: _copied(value) for name, value in given.items()}
    first = [copies.pop(name) for name in layout.names]
    return block(*first, **copies)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def of_references(model: Any, method: str | None = None) -> dict[str, Any]:
    """Return conditioning options for two references of different sizes."""
    latent = model.model.latent_format
    frames = (1,) if latent.latent_dimensions == 3 else ()
    references = [noise(1, latent.latent_channels, *frames, side, 12) for side in (8, 6)]
    return {"reference_latents": references, **({"reference_latents_method": method} if method else {})}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def first_fixed(frames: int, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Return a mask that fixes the first frame, as in image to video."""
    mask = torch.ones(1, 1, frames, height, width)
    mask[:, :, 0] = 0
    return mask


def errors(streams: list[Tensor], others: list[Tensor]) -> list[float]:
    return [float((x - y).norm() / y.norm()) for x, y in zip(streams, others, strict=True)]
