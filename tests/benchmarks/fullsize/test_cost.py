"""Test the launches and FLOPs that ToMA adds and saves, counted at full size on the meta device."""

import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks import cost, variants
from benchmarks.parts import ADAPTERS
from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT
from testbed.fullsize import Shape
from testbed.meter import META, Cost, Meter

SDXL, FLUX = Shape("sdxl"), Shape("flux")
pytestmark = pytest.mark.usefixtures("pack")  # loaded before a model is built


@cache
def base_of(shape: Shape) -> Cost:
    """Return the cost of an evaluation without ToMA. Its `parts` are the costs of the blocks of each class in
    BLOCKS."""
    kinds = {blocks.kind: blocks.kind for blocks in BLOCKS if blocks.shape == shape}
    return cost.count(shape, modules=kinds)


def toma(**settings: Any) -> variants.Variant:
    return variants.toma("", ratio=0.5, **settings)


# With `balanced` on Flux, steps 0 and 4 are full, and cache keys and values. In the merged steps 1 to 3, destinations
# attend to the keys and values of all tokens.
@pytest.mark.parametrize(
    ("shape", "step", "kernels", "most"),
    [
        (SDXL, 4, True, 0.0096),
        (SDXL, 1, False, 0.0191),
        (SDXL, 4, False, 0.0381),
        (FLUX, 0, True, 0.0445),
        (FLUX, 1, True, 0.163),
        (FLUX, 5, False, 0.335),
    ],
)
def test_launches_that_a_preset_adds(shape: Shape, step: int, kernels: bool, most: float) -> None:
    base = base_of(shape)
    merged = cost.count(shape, variants.preset("balanced", ratio=0.5, min_tokens=4), kernels=kernels, step=step)
    assert 0 < merged.launches / base.launches - 1 <= most
    assert merged.flops < 0.66 * base.flops or step == 0


@pytest.mark.parametrize(("kernels", "most"), [(True, 3), (False, 9)])
def test_what_the_regression_adds_to_a_merged_step(kernels: bool, most: int) -> None:
    """With kernels, the regression on the latent adds one launch for each propagated tensor (keys and values of each
    block, and the residual of each chain) and 43 launches for its fit."""
    settings = variants.preset("balanced", ratio=0.5, min_tokens=4)
    plain, regressed = (
        cost.count(FLUX, settings, kernels=kernels, step=1, regression=regression) for regression in (False, True)
    )
    blocks = 19 + 38
    assert 0 < regressed.launches - plain.launches < most * blocks
    if kernels:
        tensors = regressed.operations["toma.propagate"]
        assert tensors == 2 * blocks + 2
        assert (
            tensors == regressed.operations["toma.change"] == regressed.operations["bmm"] - plain.operations["bmm"] - 2
        )
        assert regressed.launches - plain.launches - tensors == 43
    assert 0 < regressed.flops / plain.flops - 1 < 0.0052


class Blocks(NamedTuple):
    """A class of merged blocks, and the name of the cost that the model family declares for it. refined: the model also
    has refiner blocks of this class, which are not merged."""

    shape: Shape
    kind: str
    cost: str
    grids: list[tuple[int, int, int]]  # (number of blocks, tokens, width)
    refined: bool = False

    @property
    def number(self) -> int:
        return sum(number for number, *_ in self.grids)

    @property
    def declared(self) -> Any:
        family, _, name = self.cost.partition(".")
        return getattr(pack_module(f"nodes.adapters.families.{family}"), name)


def two(model: str, name: str, double: int, single: int, width: int) -> list[Blocks]:
    """Return the double and single blocks of a model like Flux."""
    return [
        Blocks(Shape(model), "DoubleStreamBlock", f"{name}DOUBLE", [(double, 64**2, width)]),
        Blocks(Shape(model), "SingleStreamBlock", f"{name}SINGLE", [(single, 64**2, width)]),
    ]


BLOCKS = [
    Blocks(SDXL, "BasicTransformerBlock", "unet.COST", [(10, 64**2, 640), (60, 32**2, 1280)]),
    *two("flux", "flux.", 19, 38, 3072),
    *two("flux2", "flux.FLUX2_", 8, 48, 6144),
    *two("klein", "flux.FLUX2_", 8, 24, 4096),
    *two("chroma", "chroma.", 19, 38, 3072),
    Blocks(Shape("z_image"), "JointTransformerBlock", "lumina.Z_IMAGE", [(30, 64**2, 3840)], True),
    Blocks(Shape("lumina2"), "JointTransformerBlock", "lumina.LUMINA", [(26, 64**2, 2304)], True),
    Blocks(Shape("krea2"), "SingleStreamBlock", "krea.COST", [(28, 64**2, 6144)]),
    Blocks(Shape("qwen_image", 1328, 1328), "QwenImageTransformerBlock", "qwen.COST", [(60, 83**2, 3072)]),
    Blocks(Shape("qwen_image21"), "QwenImage21TransformerBlock", "qwen21.COST", [(32, 64**2, 4096)]),
    Blocks(Shape("sd3"), "JointBlock", "sd3.COST", [(38, 64**2, 2432)]),
    Blocks(Shape("omnigen2"), "OmniGen2TransformerBlock", "omnigen.COST", [(32, 64**2, 2520)], True),
    Blocks(Shape("ernie"), "ErnieImageSharedAdaLNBlock", "ernie.COST", [(36, 64**2, 4096)]),
    Blocks(Shape("ideogram"), "Ideogram4TransformerBlock", "ideogram.COST", [(34, 64**2, 4608)]),
    Blocks(Shape("lens"), "LensTransformerBlock", "lens.COST", [(48, 64**2, 1536)]),
    Blocks(Shape("cosmos"), "Block", "cosmos.COST", [(28, 64**2, 2048)]),
    Blocks(Shape("ltx", 512, 768, frames=13), "BasicTransformerBlock", "ltx.COST", [(28, 4992, 2048)]),
    Blocks(Shape("wan", 480, 832, frames=21), "WanAttentionBlock", "wan.COST", [(40, 32760, 5120)]),
    Blocks(Shape("ltx_av", 704, 1280, frames=16), "BasicAVTransformerBlock", "ltx.AV_COST", [(48, 14080, 4096)]),
    Blocks(Shape("h3", 768, 1344, frames=22), "DiTBlock", "h3.COST", [(50, 22176, 5376)]),
]
every_kind = pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: f"{blocks.shape.model} {blocks.kind}")


@every_kind
def test_what_auto_thinks_of_a_block(blocks: Blocks) -> None:
    """Compare the launches and FLOPs that a family declares for a block with the counted ones."""
    counted = base_of(blocks.shape).parts[blocks.kind]
    number = blocks.number
    if blocks.refined:
        counted = cost.count(blocks.shape, modules={blocks.kind: blocks.kind}, blocks=(number, 0)).parts[blocks.kind]
    assert math.ceil(counted.launches / number) == blocks.declared.launches
    # All blocks of a class need equally many launches, with two exceptions: SD3's last block has no text output, and
    # Wan's first block copies its input.
    assert counted.launches == blocks.declared.launches * number or blocks.shape.model in ("sd3", "wan")
    estimate = sum(some * blocks.declared.flops(tokens, 1, width) for some, tokens, width in blocks.grids)
    assert 0.9 < estimate / counted.flops <= 1.0


@pytest.mark.parametrize("granularity", ["stack", "block", "module"])
@every_kind
def test_what_auto_thinks_that_merging_adds(blocks: Blocks, granularity: str) -> None:
    """Compare the launches that merging adds per block, rounded up, with those that the family declares for merging."""
    cost_model = pack_module("toma_core.cost_model")
    of_model = [each for each in BLOCKS if each.shape == blocks.shape]
    place = of_model.index(blocks)
    # `skip_first_blocks` applies to double blocks and to single blocks: skipping N double blocks also skips N single
    # ones.
    skipped = sum(each.number for each in of_model[:place])
    merged = toma(
        skip_first_blocks=skipped,
        skip_last_blocks=sum(each.number for each in of_model[place + 1 :]),
        full_step_interval=0 if blocks.shape == SDXL else 3,
        min_tokens=4,
        granularity=granularity,
    )
    launches = cost.count(blocks.shape, merged, kernels=True, step=1).launches
    added = (launches - base_of(blocks.shape).launches) / (blocks.number - skipped)
    launching = blocks.declared.launching(cost_model.Granularity(granularity))
    expected = round(launching / cost_model.LAUNCH) - blocks.declared.launches
    assert expected - (granularity == "stack") <= math.ceil(added) <= expected


@pytest.mark.parametrize(("kernels", "share"), [(False, 0.02), (True, 0.003)])
def test_selection_is_next_to_nothing_of_a_videos_step(kernels: bool, share: float) -> None:
    """Count one step of Wan 14B at 1280 x 720 x 81, which has 75,600 tokens."""
    step = cost.count(Shape("wan", 720, 1280, frames=21), toma(), plan=True, kernels=kernels)
    plan = step.parts["plan"]
    assert plan.flops < 1e-4 * step.flops
    assert 0 < plan.bytes < share * step.bytes


def test_a_plan_for_two_conditions_is_no_more_launches() -> None:
    core, trial, counter = pack_module("toma_core"), pack_module("toma_core.kernels.dispatch"), Meter()
    config = core.ToMAConfig(ratio=0.5, min_tokens=4)
    run = core.RunState(core.Schedule(config), dispatch=trial.Dispatch(trial.Choice(cost.Fused(counter))))
    launches = []
    x, picture = (torch.empty(shape, device=META) for shape in ((2, 32 * 32, 640), (1, 16, 64, 64)))
    # Selections 0, 2 and 4 use the same windows.
    for selection, conditions in ((0, 2), (1, 2), (2, 2), (4, 1)):
        counter.cost = Cost()
        step = core.StepPlan(0, core.StepMode.MERGED, 0.5, selection, selection)
        with counter:
            plan = run.plan(x[:conditions], (32, 32), "a", step, (None,) * conditions, pictures=(picture,) * conditions)
        launches.append(counter.cost.launches)
    assert len(plan.dest_slots) == 1
    assert launches[-1] == launches[-2] < 50
    assert counter.cost.operations["toma.select_weigh"] == 1


def test_every_file_that_merges_is_counted() -> None:
    """ADAPTERS must list all adapters that import a merging function of the core, except `compile_ops`, because nothing
    is counted inside of compiled graphs."""
    adapters = ROOT / "nodes" / "adapters"
    paths = (path.relative_to(adapters).with_suffix("") for path in adapters.rglob("[a-z]*.py"))
    files = {".".join(path.parts) for path in paths} - {"model_hooks", "compile_ops"}
    merging = {"merge", "unmerge", "reduce", "restore"}
    assert {f for f in files if merging & vars(pack_module(f"nodes.adapters.{f}")).keys()} == set(ADAPTERS)


@pytest.mark.parametrize("variant", [variants.toma("", ratio=0.0), variants.tome_node(0.5)], ids=["off", "ToMe node"])
def test_ratio_0_and_comfyuis_tome_node_add_nothing(variant: variants.Variant) -> None:
    base, off = base_of(SDXL), cost.count(SDXL, variant)
    assert (off.launches, off.flops, off.bytes) == (base.launches, base.flops, base.bytes)


def test_the_stand_in_for_kernels_has_their_shapes() -> None:
    """`cost.Fused`, which stands in for kernels, must return the shapes and strides that kernels return."""
    pytest.importorskip("triton", reason="Triton has no build for this system")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = pack_module("toma_core.windows")
    windows = layout.make_windows(5, 7, 4).to(torch.device(device))
    budget = layout.make_budget(windows.counts, 0.5).to(torch.device(device))
    assert windows.valid is not None
    assert budget.valid is not None
    x = torch.randn(3, 35, 40, generator=torch.Generator().manual_seed(0)).half().to(device)
    counter = Meter()
    kernels = pack_module("toma_core.kernels.triton").TritonKernels(), cost.Fused(counter)

    def results(by: Any) -> list[torch.Tensor]:
        picks, M, back = by.weigh(x, None, windows, budget, 30.0)
        y = by.merge(x, M, windows, budget)
        return [
            *(picks, M, back, *by.weigh(x, real, windows, budget, 30.0)),
            *(y, by.unmerge(y, back, windows, budget), by.unmerge(y, back, windows, budget, y, x)),
        ]

    real = kernels[0].weigh(x, None, windows, budget, 30.0)[0]
    for a, b in zip(*map(results, kernels), strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
    assert counter.cost.launches == 5


@pytest.mark.parametrize(("model", "within"), [("sdxl", 0.02), ("flux", 0.08), ("z_image", 0.03), ("sd3", 0.05)])
def test_what_a_run_counts_is_what_is_counted_here(model: str, within: float) -> None:
    """Compare the FLOPs that a run derives from shapes with those that are counted. The run assumes the family's
    shortest text. The counted model has a longer text."""
    shape = Shape(model)
    hooks = pack_module("nodes.adapters.registry").find(cost.on_meta(model, None).model.diffusion_model)
    latent = torch.empty(1, *shape.latent, device="meta")
    counted = hooks.flops_beside_blocks(latent) + sum(fact.flops() for fact in hooks.blocks(latent))
    assert counted == pytest.approx(base_of(shape).flops, rel=within)
