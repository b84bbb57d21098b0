"""The queued graphs: a template, filled with prompt, seed and setting.

A template is a graph in ComfyUI's API format with %prompt% in a text (needed), %negative% and %seed% (if wanted), and
one ToMA node. The unmerged graph is the same one with the ToMA node taken out, not with its ratio at 0.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import BenchmarkError

PROMPT, NEGATIVE, SEED = "%prompt%", "%negative%", "%seed%"
SEED_INPUTS = ("seed", "noise_seed")
SIMPLE, ADVANCED, REPORT = "ToMA", "ToMAAdvanced", "ToMAReport"
SHOWN = ("PreviewImage", "SaveImage")

Graph = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What is written into the ToMA node. profile: the text of one, beside which ratio and preset do nothing; its name
    is `called`."""

    ratio: float
    preset: str
    profile: str = ""
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or f"{self.preset} {self.ratio:g}"


@dataclass(frozen=True)
class SamplingRun:
    """Picture size in pixels and the widgets of the sampler, for the two built-in graphs."""

    width: int = 1024
    height: int = 1024
    steps: int = 30
    cfg: float = 7.0
    sampler: str = "euler"
    scheduler: str = "normal"
    guidance: float | None = None


FLUX_SAMPLING = SamplingRun(steps=20, cfg=1.0, scheduler="simple", guidance=3.5)


@dataclass(frozen=True)
class FluxFiles:
    """File names in the lists of the server's loaders."""

    unet: str
    clip_l: str
    t5: str
    vae: str


def checkpoint_graph(checkpoint: str, sampling: SamplingRun) -> Graph:
    """Return a graph for SDXL, SD1.5, or Flux in one file (which needs a guidance)."""
    graph = {"loader": node("CheckpointLoaderSimple", ckpt_name=checkpoint)}
    return graph | _text_to_image(["loader", 0], ["loader", 1], ["loader", 2], "EmptyLatentImage", sampling)


def flux_graph(files: FluxFiles, sampling: SamplingRun = FLUX_SAMPLING) -> Graph:
    """Return a graph for Flux in four files."""
    graph = {
        "loader": node("UNETLoader", unet_name=files.unet, weight_dtype="default"),
        "clip": node("DualCLIPLoader", clip_name1=files.clip_l, clip_name2=files.t5, type="flux"),
        "vae": node("VAELoader", vae_name=files.vae),
    }
    return graph | _text_to_image(["loader", 0], ["clip", 0], ["vae", 0], "EmptySD3LatentImage", sampling)


def _text_to_image(model: list[Any], clip: list[Any], vae: list[Any], latent: str, sampling: SamplingRun) -> Graph:
    positive: list[Any] = ["positive", 0]
    graph = {
        "toma": node(SIMPLE, model=model),
        "positive": node("CLIPTextEncode", clip=clip, text=PROMPT),
        "negative": node("CLIPTextEncode", clip=clip, text=NEGATIVE),
        "latent": node(latent, width=sampling.width, height=sampling.height, batch_size=1),
    }
    if sampling.guidance is not None:
        graph["guidance"] = node("FluxGuidance", conditioning=positive, guidance=sampling.guidance)
        positive = ["guidance", 0]
    graph["sampler"] = node(
        "KSampler",
        model=["toma", 0],
        positive=positive,
        negative=["negative", 0],
        latent_image=["latent", 0],
        seed=SEED,
        steps=sampling.steps,
        cfg=sampling.cfg,
        sampler_name=sampling.sampler,
        scheduler=sampling.scheduler,
        denoise=1.0,
    )
    graph["decode"] = node("VAEDecode", samples=["sampler", 0], vae=vae)
    graph["picture"] = node("PreviewImage", images=["decode", 0])
    return graph


def read_graph(path: Path) -> Graph:
    """Read a user's graph. Raises BenchmarkError if the file is not in the API format."""
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path} cannot be read as JSON: {error}") from None
    if isinstance(graph, dict) and "nodes" in graph and "links" in graph:
        raise BenchmarkError(f"{path} is a workflow of the page; export it with File > Export (API) instead")
    if not isinstance(graph, dict) or not all(isinstance(n, dict) and "class_type" in n for n in graph.values()):
        raise BenchmarkError(f"{path} is not a graph in ComfyUI's API format; make one with File > Export (API)")
    return {name: {"class_type": n["class_type"], "inputs": n.get("inputs", {})} for name, n in graph.items()}


@dataclass
class Template:
    """A checked graph.

    Attributes:
        picture: id of the node whose picture is compared.
        merge: id of the ToMA node.
        seeds: ids of the nodes that the seed is written into.
    """

    graph: Graph
    output: str | None = None
    picture: str = field(init=False)
    merge: str = field(init=False)
    seeds: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.graph = copy.deepcopy(self.graph)
        self.merge = self._one([SIMPLE, ADVANCED], "the ToMA node", "Put one ToMA node between loader and sampler")
        self.picture = self.output or self._one(SHOWN, "the picture", "Name the node with --output ID")
        if self.picture not in self.graph or self.graph[self.picture]["class_type"] not in SHOWN:
            raise BenchmarkError(f"--output {self.picture}: there is no Save Image or Preview Image with this id")
        if not any(PROMPT in value for _, _, value in self._texts()):
            raise BenchmarkError(f"the graph has no {PROMPT}: type it into the box of the prompt and export again")
        # Nodes that do not lead to the picture are removed; the picture goes to the server's temporary folder.
        self.graph = upstream(self.graph, self.picture)
        if self.merge not in self.graph:
            raise BenchmarkError(f"the ToMA node {self.merge} does not lead to the picture of node {self.picture}")
        self.graph[self.picture] = node("PreviewImage", images=self.graph[self.picture]["inputs"].get("images"))
        self._find_seeds()

    def own(self, name: str) -> Any:
        """Return the value of an input of the template's ToMA node, None if there is none."""
        return self.graph[self.merge]["inputs"].get(name)

    def fill(self, prompt: str, negative: str, seed: int, setting: Setting | None) -> Graph:
        """Return the graph to queue; a setting of None removes the ToMA node."""
        graph = copy.deepcopy(self.graph)
        for each in graph.values():
            for name, value in each["inputs"].items():
                if isinstance(value, str):
                    filled = value.replace(SEED, str(seed)).replace(NEGATIVE, negative).replace(PROMPT, prompt)
                    each["inputs"][name] = seed if value == SEED else filled
        if not self._has_seed_text:
            for name in self.seeds:
                inputs = graph[name]["inputs"]
                inputs.update({key: seed for key in SEED_INPUTS if isinstance(inputs.get(key), int)})
        if setting is None:
            return self._without_merge(graph)
        inputs = graph[self.merge]["inputs"]
        inputs.update(ratio=setting.ratio, preset=setting.preset)
        if setting.profile or "profile" in inputs:
            inputs["profile"] = setting.profile
        return upstream(graph, self.picture)

    def is_pure(self, graph: Graph, cached: Iterable[str]) -> bool:
        """Return whether a run consisted of sampling, decoding and saving only: no loading, no text encoding, and no
        cached results of nodes that depend on the seed. Only times of such runs are comparable."""
        executed = set(graph) - set(cached)
        must = downstream(graph, self.seeds)
        return must <= executed <= must | downstream(graph, {self.merge})

    def _find_seeds(self) -> None:
        texts = {name for name, _, value in self._texts() if SEED in value}
        self._has_seed_text = bool(texts)
        self.seeds = texts or {
            name for name, node in self.graph.items() if any(_is_int(node["inputs"].get(key)) for key in SEED_INPUTS)
        }
        if not self.seeds:
            raise BenchmarkError(f"the graph has no seed: no number named {' or '.join(SEED_INPUTS)}, and no {SEED}")

    def _texts(self) -> Iterator[tuple[str, str, str]]:
        for name, node in self.graph.items():
            for key, value in node["inputs"].items():
                if isinstance(value, str):
                    yield name, key, value

    def _one(self, classes: Iterable[str], what: str, advice: str) -> str:
        found = [name for name, node in self.graph.items() if node["class_type"] in classes]
        if len(found) != 1:
            names = f"{len(found)} ({', '.join(found)})" if found else "none"
            raise BenchmarkError(f"one of {', '.join(classes)} must be {what} in the graph; it has {names}. {advice}")
        return found[0]

    def _without_merge(self, graph: Graph) -> Graph:
        source = graph.pop(self.merge)["inputs"].get("model")
        for node in graph.values():
            for key, value in node["inputs"].items():
                if value == [self.merge, 0]:
                    node["inputs"][key] = source
        return upstream(graph, self.picture)


def links(node: Mapping[str, Any]) -> set[str]:
    """Return the ids of a node's input nodes."""
    return {value[0] for value in node["inputs"].values() if isinstance(value, list) and len(value) == 2}


def downstream(graph: Graph, start: set[str]) -> set[str]:
    """Return some nodes of a graph and all nodes that depend on them."""
    found = start & set(graph)
    while more := {name for name, node in graph.items() if name not in found and links(node) & found}:
        found |= more
    return found


def upstream(graph: Graph, end: str) -> Graph:
    """Return the part of a graph that a node needs, itself included."""
    found, more = set(), {end}
    while more:
        found |= more
        more = {source for name in more for source in links(graph[name])} & set(graph) - found
    return {name: node for name, node in graph.items() if name in found}


def key_of(graph: Graph) -> str:
    """Return a key of everything that determines a picture."""
    return hashlib.sha256(json.dumps(graph, sort_keys=True).encode()).hexdigest()[:20]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Return a node of a graph."""
    return {"class_type": class_type, "inputs": inputs}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
