"""The graphs that are queued: a template into which prompt, seed and setting are filled.

A template is a graph in ComfyUI's API format with %prompt% in a text (required), %negative% (optional), and one ToMA
node. Unmerged pictures come from the graph without its ToMA node, not from a ratio of 0.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import BenchmarkError

PROMPT, NEGATIVE = "%prompt%", "%negative%"
SEEDS = ("seed", "noise_seed")
MERGES, SHOWN = ("ToMA", "ToMAAdvanced"), ("PreviewImage", "SaveImage")

Graph = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """The values of the ToMA node. profile: text of a profile. With a profile, ratio and preset have no effect."""

    ratio: float
    preset: str
    profile: str = ""

    @property
    def name(self) -> str:
        return "the graph's profile" if self.profile else f"{self.preset} {self.ratio:g}"


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Return a node of a graph."""
    return {"class_type": class_type, "inputs": inputs}


def checkpoint_graph(checkpoint: str, width: int, height: int, steps: int, cfg: float) -> Graph:
    """Return a graph for a checkpoint of SDXL or SD1.5 in one file. width, height: size of the picture in pixels."""
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "toma": node("ToMA", model=["loader", 0]),
        "positive": node("CLIPTextEncode", clip=["loader", 1], text=PROMPT),
        "negative": node("CLIPTextEncode", clip=["loader", 1], text=NEGATIVE),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=1),
        "sampler": node(
            "KSampler",
            model=["toma", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=0,
            steps=steps,
            cfg=cfg,
            sampler_name="euler",
            scheduler="normal",
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["loader", 2]),
        "picture": node("PreviewImage", images=["decode", 0]),
    }


def read_graph(path: Path) -> Graph:
    """Read a user's graph. Raises BenchmarkError if the file is not in the API format."""
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(graph, dict) or not all(isinstance(n, dict) and "class_type" in n for n in graph.values()):
        raise BenchmarkError(f"{path} is not a graph in ComfyUI's API format; make one with File > Export (API)")
    return {name: node(n["class_type"], **n.get("inputs", {})) for name, n in graph.items()}


class Template:
    """A checked graph. output: id of the node whose picture is compared, None if only one node shows a picture.

    Attributes:
        graph: the nodes that lead to the picture. The picture goes to the server's temporary folder.
        merge: id of the ToMA node.
        picture: id of the node whose picture is compared.
    """

    def __init__(self, graph: Graph, output: str | None = None) -> None:
        self.merge = _one(graph, MERGES, "Put one ToMA node between loader and sampler")
        self.picture = output or _one(graph, SHOWN, "Name the node with --output ID")
        if self.picture not in graph or graph[self.picture]["class_type"] not in SHOWN:
            raise BenchmarkError(f"--output {self.picture}: there is no Save Image or Preview Image with this id")
        self.graph = upstream(graph, self.picture)
        if self.merge not in self.graph:
            raise BenchmarkError(f"the ToMA node {self.merge} does not lead to the picture of node {self.picture}")
        self.graph[self.picture] = node("PreviewImage", images=graph[self.picture]["inputs"].get("images"))
        values = [value for each in self.graph.values() for value in each["inputs"].values()]
        if not any(isinstance(value, str) and PROMPT in value for value in values):
            raise BenchmarkError(f"the graph has no {PROMPT}: type it into the box of the prompt and export again")
        if not self._seeded():
            raise BenchmarkError(f"the graph has no seed: no number named {' or '.join(SEEDS)}")

    def _seeded(self) -> set[str]:
        return {name for name, each in self.graph.items() if any(type(each["inputs"].get(key)) is int for key in SEEDS)}

    def own(self, name: str) -> Any:
        """Return the value of an input of the graph's ToMA node, None if the node lacks the input."""
        return self.graph[self.merge]["inputs"].get(name)

    def fill(self, prompt: str, negative: str, seed: int, setting: Setting | None) -> Graph:
        """Return the graph to queue. If the setting is None, the ToMA node is removed."""
        graph = copy.deepcopy(self.graph)
        for each in graph.values():
            for name, value in each["inputs"].items():
                if isinstance(value, str):
                    each["inputs"][name] = value.replace(NEGATIVE, negative).replace(PROMPT, prompt)
                elif name in SEEDS and type(value) is int:
                    each["inputs"][name] = seed
        if setting is None:
            source = graph.pop(self.merge)["inputs"].get("model")
            for each in graph.values():
                each["inputs"] = {k: source if v == [self.merge, 0] else v for k, v in each["inputs"].items()}
        else:
            inputs = graph[self.merge]["inputs"]
            inputs.update(ratio=setting.ratio, preset=setting.preset)
            if setting.profile or "profile" in inputs:
                inputs["profile"] = setting.profile
        return upstream(graph, self.picture)

    def is_pure(self, graph: Graph, cached: Iterable[str]) -> bool:
        """Return whether a run only sampled, decoded and saved. It must have loaded nothing, encoded no text, and run
        every node that depends on the seed. Only the times of these runs are comparable."""
        executed = set(graph) - set(cached)
        must = downstream(graph, self._seeded())
        return must <= executed <= must | downstream(graph, {self.merge})


def _one(graph: Graph, classes: Iterable[str], advice: str) -> str:
    """Return the id of the only node of these classes."""
    found = [name for name, each in graph.items() if each["class_type"] in classes]
    if len(found) != 1:
        names = f"{len(found)} ({', '.join(found)})" if found else "none"
        raise BenchmarkError(f"the graph needs one node of {', '.join(classes)}; it has {names}. {advice}")
    return found[0]


def links(of: dict[str, Any]) -> set[str]:
    """Return the ids of a node's input nodes."""
    return {value[0] for value in of["inputs"].values() if isinstance(value, list) and len(value) == 2}


def downstream(graph: Graph, start: set[str]) -> set[str]:
    """Return the nodes `start` of a graph and all nodes that depend on them."""
    found = start & set(graph)
    while more := {name for name, each in graph.items() if name not in found and links(each) & found}:
        found |= more
    return found


def upstream(graph: Graph, end: str) -> Graph:
    """Return the part of a graph on which a node depends, including the node."""
    found, more = set(), {end}
    while more:
        found |= more
        more = {source for name in more for source in links(graph[name])} & set(graph) - found
    return {name: each for name, each in graph.items() if name in found}


def key_of(graph: Graph) -> str:
    """Return a hash of a graph. The graph determines its picture."""
    return hashlib.sha256(json.dumps(graph, sort_keys=True).encode()).hexdigest()[:20]
