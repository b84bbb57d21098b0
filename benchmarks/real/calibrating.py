"""Run ToMA Calibrate on the user's server with the graph's model (without ToMA) and its sampling inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import BenchmarkError
from .graphs import Graph, Template, downstream, key_of, node, upstream
from .pictures import Folder, say
from .server import Server

NODE = "ToMACalibrate"
# Targets of ToMA Calibrate.
TARGETS = ("quality", "balanced", "fast")
# Default for graphs without it, such as those with a scheduler of one family.
DEFAULTS = {"cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}


@dataclass(frozen=True)
class Calibrated:
    """near: as it was asked for. profile: the text of it. said: what the node said, a sentence on each line."""

    near: str
    profile: str
    said: str

    @property
    def name(self) -> str:
        return f"calibrated {self.near}"

    @property
    def file(self) -> str:
        return f"{self.name.replace(' ', '-')}.json"


def near_of(text: str) -> str:
    """Return a value of --calibrate. Raises BenchmarkError."""
    if text not in TARGETS:
        raise BenchmarkError(f"--calibrate {text}: give {', '.join(TARGETS)}")
    return text


def calibration_graph(template: Template, prompt: str, negative: str, seed: int, near: str) -> tuple[Graph, str, str]:
    """Return the graph, and the ids of ToMA Calibrate and of the node that shows the profile. Raises BenchmarkError if
    the graph has several samplers."""
    graph = template.fill(prompt, negative, seed, None)
    # Sampler or guider: the node with both the model and the prompt as inputs.
    after = downstream(template.graph, {template.merge}) & set(graph)
    guides = [name for name in after if _says(graph, name, "model") and _prompt(graph, name)]
    if len(guides) != 1:
        found = f"{len(guides)} ({', '.join(sorted(guides))})" if guides else "none"
        raise BenchmarkError(
            f"--calibrate needs one sampler behind the ToMA node; the graph has {found}. Use the node ToMA Calibrate "
            "in ComfyUI itself, and connect its profile"
        )
    (guide,) = guides
    inputs: dict[str, Any] = {"positive": _prompt(graph, guide), "target": near}
    if (given := graph[guide]["inputs"].get("negative")) is not None:
        inputs["negative"] = given
    for name in ("steps", "cfg", "sampler_name", "scheduler"):
        inputs[name] = _said_once(graph, guide, name)
    inputs["latent"] = _said_once(graph, guide, "latent_image")
    measures, shows = _free(graph, "calibrate"), _free(graph, "profile")
    graph[measures] = node(NODE, model=graph[guide]["inputs"]["model"], **inputs)
    graph[shows] = node("PreviewAny", source=[measures, 1])
    return upstream(graph, shows), measures, shows


def calibrate(
    server: Server, template: Template, folder: Folder, nears: Sequence[str], prompt: str, negative: str, seed: int
) -> list[Calibrated]:
    """Return one profile for each value, from the folder if it is stored there."""
    server.widgets(NODE)
    file = folder.path / "calibrated.json"
    try:
        known: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    results = []
    for near in nears:
        graph, measures, shows = calibration_graph(template, prompt, negative, seed, near)
        key = key_of(graph)
        if key not in known:
            say(f"calibrating for {near} ...")
            outputs = server.outputs(graph)
            status = outputs.get(measures, {}).get("toma", [{}])[0].get("text", "")
            profile = outputs[shows]["text"][0]
            if not profile:
                raise BenchmarkError(f"--calibrate {near}: {status or 'nothing was found out'}")
            known[key] = {"profile": profile, "said": status}
            folder.write(file, json.dumps(known, indent=1).encode())
        found = Calibrated(near, **known[key])
        folder.write(folder.path / found.file, found.profile.encode())
        say(f"{found.name}: {found.said.splitlines()[0] if found.said else 'done'}")
        results.append(found)
    return results


def _free(graph: Graph, name: str) -> str:
    return name if name not in graph else _free(graph, f"{name}_")


def _prompt(graph: Graph, name: str) -> Any:
    return _says(graph, name, "positive") or _says(graph, name, "conditioning")


def _says(graph: Graph, name: str, key: str) -> Any:
    """Return the link at an input of a node, None if there is none."""
    value = graph[name]["inputs"].get(key)
    return value if isinstance(value, list) else None


def _said_once(graph: Graph, guide: str, key: str) -> Any:
    """Return the value of an input by name: of the sampler, else of the only node that has it."""
    at = [guide] if key in graph[guide]["inputs"] else [name for name, each in graph.items() if key in each["inputs"]]
    values = [graph[name]["inputs"][key] for name in at]
    if len(values) > 1 and any(value != values[0] for value in values):
        raise BenchmarkError(f"--calibrate: several nodes of the graph say '{key}' ({', '.join(at)})")
    if not values and key not in DEFAULTS:
        raise BenchmarkError(f"--calibrate: no node of the graph says '{key}'")
    return values[0] if values else DEFAULTS[key]
