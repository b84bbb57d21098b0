"""Test `scripts.api_check`: all names of ComfyUI that the pack uses are in known.json and in the tested ComfyUI."""

import os
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.api_check import compare
from scripts.api_check.__main__ import main
from scripts.api_check.compare import Kind
from scripts.api_check.facts import GONE, UNSEEN, facts_of
from scripts.api_check.families import Family, uses_of
from scripts.api_check.source import Source
from scripts.api_check.uses import StandIn, Uses, uses_in
from scripts.comfy_pack import pack_module
from scripts.comfyui import RELEASES, ROOT, ComfyUI
from testbed import models

WRITE = "make api-check ARGS='--write FOLDER', with a folder of each release that cannot be downloaded, writes it again"


class Pack(NamedTuple):
    """The names that the pack uses, the entries of known.json, and the definitions in this ComfyUI."""

    uses: Uses
    families: dict[str, Family]
    known: compare.Known
    facts: dict[str, str]
    here: Path


@pytest.fixture(scope="module")
def all_of_it() -> Pack:
    uses, families = uses_of(ROOT)
    here = Path(os.environ["COMFYUI_PATH"])
    return Pack(uses, families, compare.read(), facts_of(here, uses, families), here)


@pytest.mark.compat
def test_this_comfyui_has_what_the_pack_uses(all_of_it: Pack) -> None:
    """Every method that runs a model's blocks must be listed, or a step cache could replace it unnoticed."""
    uses, _, known, facts, here = all_of_it
    version = ComfyUI(here, "", here).version
    known_version = compare.nearest(known, version)
    found = compare.differences(uses, facts, known, known_version, here)
    unlisted = [str(each) for each in found if each.kind is Kind.UNLISTED]
    assert not unlisted, f"known.json does not list what the pack uses: {WRITE}"
    assert [str(each) for each in found if each.fatal] == []
    if any(version in texts for texts in known.values()):
        assert [str(each) for each in found] == [], f"known.json has something else of {version}: {WRITE}"
    loops = {use.subject: set(facts[use.item].split(", ")) - use.allowed for use in uses.values() if use.kind == "loop"}
    assert {subject: left for subject, left in loops.items() if left - {GONE}} == {}
    new = {"name comfy.sample.nothing", "call comfy.sample.nothing"}
    more = dict(uses)
    uses_in("import comfy.sample\ncomfy.sample.nothing(1)\n", more, {})
    found = compare.differences(more, {**facts, **dict.fromkeys(new, GONE)}, known, known_version, here)
    assert {each.use.item for each in found if each.kind is Kind.UNLISTED} == new


def test_data_has_every_release_and_nothing_else(all_of_it: Pack) -> None:
    """Only optional names, and names of models that are newer than a release, may be missing in that release."""
    uses, known = all_of_it.uses, all_of_it.known
    assert set(known) <= set(uses), f"the pack uses some of these no longer: {WRITE}"
    newest = pack_module("nodes.adapters.compat").NEWEST_TRIED
    releases = {*RELEASES, newest}
    assert {item: sorted(releases - set(texts)) for item, texts in known.items() if set(texts) != releases} == {}
    for item, texts in known.items():
        use = uses[item]
        later = use.kind in ("path", "block", "loop", "derived") or use.subject.startswith("comfy.ldm.")
        assert use.optional or later or GONE not in texts.values(), item


@pytest.mark.compat
@pytest.mark.parametrize("kind", models.KINDS)
def test_blocks_are_those_that_hooks_stand_in_for(kind: str, all_of_it: Pack) -> None:
    """The signatures that are read from ComfyUI's source code must equal those of a real model."""
    registry, contract = pack_module("nodes.adapters.registry"), pack_module("nodes.adapters.compat")
    try:
        model = (models.unet if kind == "unet" else models.TRANSFORMERS[kind])().model.diffusion_model
    except (ImportError, AttributeError):
        pytest.skip("this ComfyUI has no such model")
    if Source(all_of_it.here).module(type(model).__module__) is None:
        pytest.skip("a stand-in for a class that this ComfyUI does not have")
    blocks = [use for use in all_of_it.uses.values() if use.kind == "block"]
    forms = {form: use for use in blocks for form in all_of_it.facts[use.item].split("; ")}
    for module, hook in registry.find(model).hook_pairs():
        names = [
            f"{p.name}=" if p.default is not p.empty else str(p).partition(":")[0]
            for p in list(signature(type(module).forward).parameters.values())[1:]
        ]
        form = f"{type(module).__name__}({', '.join(names)})"
        if form.startswith("ErnieImageAttention("):  # the module in a block, of which the check sees only its name
            contract.check(module, hook)
            continue
        assert form in forms, f"{kind}: not read from ComfyUI's source"
        contract.check(module, hook)
        assert any(compare.stands_in(each, form) for each in forms[form].stand_ins)
        if (known := getattr(hook, "signature", None)) is not None:
            stand_in = StandIn(tuple(known.positional_args), frozenset(known.required_kwargs), frozenset())
            assert stand_in in [StandIn(each.places, each.required, frozenset()) for each in forms[form].stand_ins]


FILES = ("comfy/ldm/flux/model.py", "comfy/ldm/flux/layers.py", "comfy/samplers.py", "comfy/model_patcher.py")
MODEL, LAYERS, SAMPLERS, PATCHER = FILES
CLONE = "comfy.model_patcher.create_model_options_clone"
ADD_WRAPPER = "comfy.model_patcher.ModelPatcher.add_wrapper_with_key"
FLUX_BLOCK = "block flux Flux.double_blocks"


@pytest.fixture
def some_files(tmp_path: Path, all_of_it: Pack) -> Path:
    """Return a folder with copies of FILES."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(all_of_it.here / name, tmp_path / name)
    return tmp_path


def renamed(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a function that replaces the text `old` by `new` in a file of a folder."""

    def change(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        assert old in text
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")

    return change


ORDER = "wrapper_type: str, key: str, wrapper", "key: str, wrapper_type: str, wrapper"
OTHER_SCHEDULE = "execute(noise, latent_image, sampler, sigmas", "execute(noise, sampler, sigmas"
ONE_MORE = "disable_pbar, seed, latent_shapes=", "disable_pbar, seed, more, latent_shapes="
# One more argument for `forward` of Flux's double blocks: REGION has no default, OPTIONAL_REGION has one.
REGION = (
    "img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, attn",
    "img: Tensor, region, txt: Tensor, vec: Tensor, pe, attn",
)
OPTIONAL_REGION = "modulation_dims_txt=None, transformer", "modulation_dims_txt=None, region=None, transformer"
LESS = renamed(PATCHER, "create_model_options_clone", "clone_options")


def with_flux_3(folder: Path) -> None:
    file = folder / "comfy/ldm/flux/three.py"
    file.write_text("from .model import Flux\nclass Flux3(Flux): pass\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("item", "kind", "change"),
    [
        (f"name {CLONE}", Kind.GONE, LESS),
        (f"call {ADD_WRAPPER}", Kind.UNFIT, renamed(PATCHER, *ORDER)),
        ("wrapper OUTER_SAMPLE", Kind.UNFIT, renamed(SAMPLERS, *OTHER_SCHEDULE)),
        ("wrapper OUTER_SAMPLE", Kind.CHANGED, renamed(SAMPLERS, *ONE_MORE)),
        (FLUX_BLOCK, Kind.UNFIT, renamed(LAYERS, *REGION)),
        (FLUX_BLOCK, Kind.CHANGED, renamed(LAYERS, *OPTIONAL_REGION)),
        ("path flux double_blocks", Kind.GONE, renamed(MODEL, "self.double_blocks", "self.joint")),
        ("loop flux Flux.double_blocks", Kind.NEW, renamed(MODEL, "def forward_orig", "def run_blocks")),
        ("derived flux", Kind.NEW, with_flux_3),
    ],
)
def test_change_is_found(some_files: Path, all_of_it: Pack, item: str, kind: Kind, change: Any) -> None:
    change(some_files)
    uses, families, _, facts, _ = all_of_it
    few = {each: use for each, use in uses.items() if " flux" in each or use.kind == "wrapper" or "patcher" in each}
    known = {each: {"1.0": facts[each]} for each in few}
    now = facts_of(some_files, few, {"flux": families["flux"]})
    found = compare.differences(few, now, known, "1.0", some_files)
    assert (item, kind) in [(each.use.item, each.kind) for each in found]
    if kind is Kind.CHANGED and item == FLUX_BLOCK:
        assert "a value in region leaves the block unmerged" in str(next(e for e in found if e.use.item == item))
    fatal = {each.use.item for each in found if each.fatal}
    assert (item in fatal) is (kind in (Kind.GONE, Kind.UNFIT))


def test_command_on_a_folder_with_some_files(
    some_files: Path, all_of_it: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names from files that the folder lacks are not reported as missing."""
    uses, families, _, facts, here = all_of_it
    partial = facts_of(some_files, uses, families)
    seen = [item for item in facts if uses[item].kind not in ("key", "trait", "derived")]
    assert [item for item in seen if partial[item] not in (facts[item], UNSEEN)] == []
    assert [item for item in (FLUX_BLOCK, "wrapper OUTER_SAMPLE") if partial[item] != facts[item]] == []
    assert partial["block wan WanModel.blocks"] == UNSEEN
    assert main([str(here)]) == 0
    assert "Nothing stops merging." in capsys.readouterr().out
    LESS(some_files)
    assert main([str(some_files), "--all"]) == 1
    printed = capsys.readouterr().out
    assert "some files only" in printed
    assert "Missing (1):\n  name comfy.model_patcher.create_model_options_clone\n" in printed
    assert "  wrapper OUTER_SAMPLE: (noise, latent_image, sampler, sigmas," in printed
    assert main([str(some_files / "nothing")]) == 2
