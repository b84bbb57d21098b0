"""The sections of `benchmarks.suite`, the most important first, with their time limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import breakeven, forward, micro, sample, variants
from benchmarks.gpu import kernels, place
from benchmarks.results import Results
from benchmarks.variants import Variant
from testbed import fullsize
from testbed.full_model import SPECS
from testbed.fullsize import Shape

RATIO = 0.5
DRY = 16  # a dry run divides the sides of pictures by this number
_LEAST = 64  # smallest side in a dry run, in pixels
# Share of a section's remaining time for timed turns. The other time is for the profiles and checks that follow.
_TIMED = 0.7


@dataclass
class Suite:
    """The context of a section. deadline: the value of `time.time` at which the section is stopped."""

    dry: bool
    device: torch.device
    dtype: torch.dtype
    deadline: float
    results: Results
    _built: dict[Any, Any] = field(default_factory=dict)

    def left(self) -> float:
        """Return the seconds until the section is stopped."""
        return self.deadline - time.time()

    def patcher(self, name: str, blocks: tuple[int, ...] | None = None) -> Any:
        """Return the model of this name, which is built at its first use in a section."""
        key = name, blocks
        if key not in self._built:
            self._built[key] = fullsize.patcher(name, self.dtype, self.device, tiny=self.dry, blocks=blocks)
        return self._built[key]

    def shape(self, name: str, side: int, batch: int = 1, width: int = 0, frames: int = 1) -> Shape:
        """Return the shape of a picture, or of a video with this number of latent frames. A width of 0 means a square.
        In a dry run the picture is small."""
        height, width = (max(side // DRY, _LEAST) if self.dry else side for side in (side, width or side))
        return Shape(name, height, width, batch, self.dry, frames=frames)

    @property
    def more(self) -> dict[str, Any]:
        """Return the additional settings that ToMA needs to merge the tiny models of a dry run."""
        return variants.TINY if self.dry else {}

    def toma(self, name: str, **settings: Any) -> Variant:
        """Return ToMA at the suite's ratio, every step merged."""
        return variants.toma(name, ratio=RATIO, **settings, **self.more)

    def runs(
        self, name: str, side: int, steps: int, cfg: float, chosen: Sequence[Variant], share: float = 1, **more: Any
    ) -> None:
        """Measure complete sampling runs, within `share` of the section's remaining time."""
        steps = min(steps, 3) if self.dry else steps  # with one merged step: presets make the first and last full
        what = self.patcher(name), self.shape(name, side), steps, cfg, chosen, self.repeats(9), self.device
        self.results.add(*sample.measure(*what, limit=self.left() * share * _TIMED, **more))

    def evaluations(
        self,
        shape: Shape,
        chosen: Sequence[Variant],
        repeats: int = 5,
        blocks: tuple[int, ...] | None = None,
        **more: Any,
    ) -> None:
        """Measure single evaluations of a model, within the section's remaining time. blocks: number of blocks, all if
        None."""
        more = {"limit": self.left() * _TIMED, **more}
        patcher, repeats = self.patcher(shape.model, blocks), self.repeats(repeats)
        self.results.add(*forward.measure(patcher, shape, chosen, repeats, self.device, blocks=blocks, **more))

    def repeats(self, most: int) -> int:
        """Return the highest number of turns: `most`, or 1 in a dry run."""
        return 1 if self.dry else most

    def balanced(self) -> Variant:
        """Return ToMA with the node's default, the preset `balanced`."""
        return variants.preset("balanced", ratio=RATIO, **self.more)

    def every_and_balanced(self) -> list[Variant]:
        """Return two variants of ToMA: with every step merged, and with the node's default."""
        return [self.toma("every step"), self.balanced()]


Run = Callable[[Suite], None]


@dataclass(frozen=True)
class Section:
    """A section of the suite."""

    name: str
    run: Run
    needs: float  # the section is skipped if fewer seconds are left
    limit: float = float("inf")  # seconds after which the section is stopped, start and warm-up included
    # An extra section begins only if enough time is left for all later sections that are not extra.
    extra: bool = False


def right(suite: Suite) -> None:
    """Check every kernel against fp64."""
    for row in kernels.measure(suite.dry, suite.device, suite.left):
        suite.results.add(row)


def operations(suite: Suite) -> None:
    """Measure selection, weights, merge and unmerge separately."""
    limits = micro.Limits.measured(suite.dtype, suite.device)
    suite.results.conditions |= {"TFLOPs": round(limits.flops / 1e12, 3), "GBps": round(limits.bandwidth / 1e9, 1)}
    here = micro.kernels_here(suite.device)
    grids = (micro.Grid(16, 16, 64),) if suite.dry else micro.GRIDS
    for number, grid in enumerate(grids):
        limit = suite.left() * _TIMED / (len(grids) - number)
        rows = micro.measure(grid, RATIO, 1, suite.dtype, suite.device, limits, suite.repeats(20), here, limit)
        suite.results.add(*rows)


def whole_runs(name: str, side: int, steps: int, cfg: float) -> Run:
    """Return a section of complete sampling runs. With a cfg of 1 an evaluation computes one condition, otherwise
    two."""
    return lambda suite: suite.runs(name, side, steps, cfg, suite.every_and_balanced())


def host(suite: Suite) -> None:
    """Measure an evaluation of one image and of two: how long the host takes to launch it, and how long the GPU works.
    At 256 x 256 the GPU has little work, and an evaluation takes as long as its launches."""
    every = {"min_tokens": 4, **suite.more}
    chosen = [variants.toma("stack", ratio=RATIO, **every), variants.preset("balanced", ratio=RATIO, **every)]
    shapes = ((1024, 1), (1024, 2), (256, 1), (256, 2))
    for side, batch in shapes[:2] if suite.dry else shapes:  # two shapes in a dry run, where all sides become the same
        shape = suite.shape("sdxl", side, batch)
        suite.evaluations(shape, chosen, 8, section="host", limit=suite.left() / 5, profiles=True)


def sdxl_steps(suite: Suite) -> None:
    """Measure runs of 4 and 8 steps with a step cache, with ToMA, and with a step cache and ToMA. Also measure runs of
    50 steps with ToMA."""
    for steps, share in ((4, 0.3), (8, 0.4), (50, 0.9)):
        chosen = sample.usual_variants(RATIO, **suite.more) if steps < 20 else suite.every_and_balanced()
        suite.runs("sdxl", 1024, steps, 7.0, chosen, share, shares=False)


def sdxl_rivals(suite: Suite) -> None:
    """Measure one evaluation of SDXL 1024: every granularity, and the rivals."""
    shape = suite.shape("sdxl", 1024, 2 if suite.device.type == "cuda" or suite.dry else 1)
    granular = forward.toma_variants([RATIO], forward.GRANULARITIES, suite.more)
    rivals = variants.unet_rivals(RATIO)
    stacked = (variants.stacked(rival, granular[-1]) for rival in rivals[1:])
    suite.evaluations(shape, [*granular, suite.balanced(), *rivals, *stacked], 20, check_kernels=True)


def compiled(suite: Suite) -> None:
    """Measure torch.compile through ComfyUI's node, alone and with ToMA in both orders. Results are written after each
    variant."""
    compiler, merged = variants.compiled("eager" if suite.dry else "inductor"), suite.toma("stack")
    shape = suite.shape("sdxl", 1024, 2)
    turns = [[merged, compiler], [variants.stacked(merged, compiler)], [variants.stacked(compiler, merged)]]
    for chosen in turns[1:2] if suite.dry else turns:  # a dry run traces one variant, because tracing takes long
        suite.evaluations(shape, chosen, 15, section="torch.compile", limit=suite.left() * 0.4)
        torch.compiler.reset()


def kv_place(suite: Suite) -> None:
    """Measure a merged step with keys and values on the card and in main memory, in Flux.1 at 1024 and in a block of
    LTX-2 at 1280 x 704 x 121. Also measure the speed of copies."""
    suite.results.note(place.copy_speeds(suite.device, suite.dry))
    chosen = place.chosen(RATIO, **suite.more)
    suite.evaluations(suite.shape("flux", 1024), chosen, section="place", limit=suite.left() * 0.5)
    video = suite.shape("ltx_av", 704, width=1280, frames=16)
    suite.evaluations(video, chosen, blocks=(4,), section="place", farthest=_FAR)


def break_even(suite: Suite) -> None:
    """Measure the number of tokens from which merging pays, with stacks of SDXL's blocks."""
    sides = (4,) if suite.dry else (8, 12, 16, 24, 32)
    stacks = ((64, 1),) if suite.dry else breakeven.STACKS
    for width, depth in stacks:
        rows = breakeven.measure(width, depth, sides, RATIO, suite.repeats(7), suite.dtype, suite.device, batch=1)
        suite.results.add(*rows)


def cpu_sdxl(suite: Suite) -> None:
    """Measure full-size SDXL on a CPU: ToMA and every rival."""
    rivals = variants.unet_rivals(RATIO)
    stack = forward.toma_variants([RATIO], ["stack"], suite.more)[0]
    chosen = [stack, suite.balanced(), *rivals, *(variants.stacked(rival, stack) for rival in rivals[2:])]
    suite.evaluations(suite.shape("sdxl", 1024), chosen, limit=suite.left() * 0.4)


def cpu_flux(suite: Suite) -> None:
    """Measure three full-width blocks of Flux on a CPU, all merged."""
    every_block = {"skip_first_blocks": 0, **suite.more}
    chosen = forward.toma_variants([RATIO], forward.GRANULARITIES, every_block)
    suite.evaluations(suite.shape("flux", 1024), chosen, blocks=(1, 2), limit=suite.left() * 0.2)


# Models with their native side in pixels, the most used first.
FAMILIES = (
    ("z_image", 1024),
    ("qwen_image", 1328),
    ("krea2", 1024),
    ("flux2", 1024),
    ("klein", 1024),
    ("sd3", 1024),
    ("chroma", 1024),
)


# Maximum error for a few blocks, which have random weights and no unmerged blocks around them. An output of zeros would
# have an error of 1.
_FAR = 0.8


def few_blocks(name: str, side: int, blocks: tuple[int, ...] = (), *, keys: bool = False, **shape: int) -> Run:
    """Return a section that measures a few full-width blocks on a CPU, all merged. blocks: number of blocks of each
    kind, by default `ModelSpec.few`. keys: also measure a merged step of `balanced`, in which destinations attend to
    all tokens, with a full and a 4-bit KV cache."""

    def section(suite: Suite) -> None:
        chosen, few = forward.toma_variants([RATIO], ["stack"], suite.more), blocks or SPECS[name].few
        if keys:
            cached = variants.preset("balanced", ratio=RATIO, min_tokens=4)
            chosen += [cached, replace(cached, name=f"{cached.name}, keys in four bits", packs=True)]
        limit = 160 if keys else 40
        suite.evaluations(suite.shape(name, side, **shape), chosen, blocks=few, limit=limit, farthest=_FAR)

    return section


def cpu_runs(suite: Suite) -> None:
    """Measure runs of full-size SDXL at 512 x 512: 4 steps with a step cache, with ToMA, and with both."""
    chosen = sample.usual_variants(RATIO, **suite.more)
    suite.runs("sdxl", 512, 4, 1.0, chosen, 0.7)


# torch.compile comes last, after the less important sections.
GPU = (
    Section("kernels", right, 30, 110),
    Section("sdxl-1024-cfg", whole_runs("sdxl", 1024, 20, 7.0), 20, 50),
    Section("sdxl-rivals", sdxl_rivals, 20, 45),
    Section("micro", operations, 20, 50),
    Section("host", host, 20, 45),
    Section("flux-1024", whole_runs("flux", 1024, 20, 1.0), 35, 70),
    Section("z-image-1024", whole_runs("z_image", 1024, 8, 1.0), 20, 45),
    Section("qwen-1328", whole_runs("qwen_image", 1328, 8, 1.0), 35, 75),
    Section("sdxl-2048", whole_runs("sdxl", 2048, 20, 7.0), 30, 65),
    Section("kv-place", kv_place, 40, 100, extra=True),
    Section("flux-2048", whole_runs("flux", 2048, 8, 1.0), 40, 75, extra=True),
    Section("sdxl-1024", whole_runs("sdxl", 1024, 20, 1.0), 20, 40, extra=True),
    Section("sdxl-steps", sdxl_steps, 30, 75, extra=True),
    Section("break-even", break_even, 15, 30, extra=True),
    Section("compile", compiled, 60, 135),
)
CPU = (
    Section("micro", operations, 20),
    Section("sdxl", cpu_sdxl, 120),
    Section("flux", cpu_flux, 60),
    *(Section(f"blocks-{name}", few_blocks(name, side), 40) for name, side in FAMILIES),
    Section("steps", cpu_runs, 200),
    Section("break-even", break_even, 60),
    # The following sections take minutes each, so the default time limit excludes them.
    Section("video-480p-21-frames", few_blocks("wan", 480, (1,), keys=True, width=832, frames=6), 900),
    Section("video-ltx-121-frames", few_blocks("ltx_av", 352, (1,), keys=True, width=640, frames=16), 900),
    Section("video-h3-22-frames", few_blocks("h3", 480, (1,), keys=True, width=864, frames=7), 900),
)
