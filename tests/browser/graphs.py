"""Provide the workflows that browser tests open, and the expected status texts."""

from __future__ import annotations

from itertools import count
from typing import Any

IDS, SEEDS = count(1), count(1)  # ComfyUI sends no messages for a cached sampler, so seeds must be new
CACHED = "Nothing ran: ComfyUI had this result in its cache. Change the seed to see what is merged."
NEW, ACTIVE = "No run yet.", "Sampling on fewer tokens ..."
TO_DO = {
    "ToMAReport": "No run yet. Connect the model after ToMA and the sampler's latent, then press Run.",
    "ToMABenchmark": "No run yet. Connect model, prompt and an empty latent, then press Run: it takes as long as about "
    "13 pictures.",
    "ToMACalibrate": "No run yet. Connect model, prompt and an empty latent, then press Run: it takes as long as 4 to "
    "6 pictures, once.",
}
EMPTY: dict[str, Any] = {"nodes": [], "links": [], "version": 0.4}
STEPS = 4
EARLIER = "{} (from an earlier run)"
# Indices of ToMA Advanced's widgets `start_percent` and `window_size`.
START, WINDOW_SIZE = 9, 11
# JavaScript that records in `window.shown` the first line of each status text that a node shows.
WATCH = """id => {
    const element = window.statusOf(id)
    window.shown = []
    new MutationObserver(() => {
        const [line] = element.textContent.split("\\n")
        if (line !== window.shown.at(-1)) window.shown.push(line)
    }).observe(element, { childList: true, subtree: true, characterData: true })
}"""


def node(node_id: int, kind: str, pos: tuple[int, int], values: Any = (), inputs: Any = (), outputs: Any = ()) -> Any:
    """Return a node in the format of workflow files. inputs: tuples (name, type, link). outputs: tuples (type,
    links)."""
    return {
        "id": node_id,
        "type": kind,
        "pos": list(pos),
        "size": [320, 80],
        "flags": {},
        "order": node_id,
        "mode": 0,
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"name": type_, "type": type_, "links": list(links)} for type_, links in outputs],
        "properties": {},
        "widgets_values": list(values),
    }


def workflow(ratio: float = 0.5, *, last: str = "ToMAReport", ends_at: float = 1.0) -> dict[str, Any]:
    """Return the workflow loader -> ToMA Advanced -> KSampler -> decode -> `last`. If `last` is the benchmark or
    calibration node, it takes the place of KSampler."""
    scene = [next(SEEDS), "fixed", 1, *["from seed"] * 14]
    advanced = ["balanced", ratio, 1, 0, ends_at, 16, "preset", -1, "preset", -1, 10, -1, -1]
    advanced += ["preset", "preset", ""]
    sampled = last == "ToMAReport"
    nodes = [
        node(1, "ToMADemoUNet", (0, 0), ["random", 0, "fixed"], outputs=[("MODEL", [1])]),
        node(
            2, "ToMADemoScene", (0, 160), scene, outputs=[("CONDITIONING", [2]), ("CONDITIONING", [3]), ("STRING", [])]
        ),
        node(3, "ToMADemoLatent", (0, 700), [128, 128, 1], outputs=[("LATENT", [4])]),
        node(4, "ToMAAdvanced", (400, 0), advanced, [("model", "MODEL", 1)], [("MODEL", [5, 6] if sampled else [5])]),
    ]
    links = [[1, 1, 0, 4, 0, "MODEL"]]
    if sampled:
        values = [next(SEEDS), "fixed", STEPS, 2, "euler", "normal", 1]
        into = [("model", "MODEL", 5), ("positive", "CONDITIONING", 2), ("negative", "CONDITIONING", 3)]
        nodes += [
            node(5, "KSampler", (850, 0), values, [*into, ("latent_image", "LATENT", 4)], [("LATENT", [7, 8])]),
            node(6, "ToMADemoDecode", (850, 400), [4], [("samples", "LATENT", 7)], [("IMAGE", [9])]),
            node(
                7,
                "ToMAReport",
                (1250, 0),
                [],
                [("model", "MODEL", 6), ("latent", "LATENT", 8), ("image", "IMAGE", 9)],
                [("STRING", []), ("IMAGE", []), ("LATENT", [])],
            ),
        ]
        links += [[2, 2, 0, 5, 1, "CONDITIONING"], [3, 2, 1, 5, 2, "CONDITIONING"], [4, 3, 0, 5, 3, "LATENT"]]
        links += [[5, 4, 0, 5, 0, "MODEL"], [6, 4, 0, 7, 0, "MODEL"], [7, 5, 0, 6, 0, "LATENT"]]
        links += [[8, 5, 0, 7, 1, "LATENT"], [9, 6, 0, 7, 2, "IMAGE"]]
    else:
        into = [("model", "MODEL", 5), ("positive", "CONDITIONING", 2), ("latent", "LATENT", 4)]
        outputs = [("IMAGE", []), ("STRING", []), ("FLOAT", [])]
        values = [0.6, "balanced", True, 4, 2]
        if last == "ToMACalibrate":
            outputs = [("MODEL", []), ("STRING", []), ("IMAGE", [])]
            # A new cfg prevents ComfyUI from using a cached result.
            values = ["balanced", STEPS, 2 + next(SEEDS) / 10, "euler", "normal"]
        nodes.append(node(7, last, (850, 0), values, [*into, ("negative", "CONDITIONING", 3)], outputs))
        links += [[2, 2, 0, 7, 1, "CONDITIONING"], [3, 2, 1, 7, 3, "CONDITIONING"], [4, 3, 0, 7, 2, "LATENT"]]
        links += [[5, 4, 0, 7, 0, "MODEL"]]
    # Give the last node the size of a new node. Such a node grows when it shows its first picture.
    nodes[-1]["size"] = [480, 290] if sampled else [460, 370]
    graph_id = f"00000000-0000-4000-8000-{next(IDS):012}"
    size = {"last_node_id": 7, "last_link_id": 9, "groups": [], "version": 0.4}
    return {"id": graph_id, "nodes": nodes, "links": links, **size}


def simple() -> dict[str, Any]:
    """Return `workflow()` with the ToMA node in place of ToMA Advanced."""
    graph = workflow()
    graph["nodes"][3].update(type="ToMA", widgets_values=[0.5, "balanced"])
    return graph


def line(ratio: float, steps: int = STEPS) -> str:
    """Return ToMA Advanced's status line for a run in which every step is merged."""
    return f"On: {100 * ratio:.0f} % of the tokens merged, 16 of 17 blocks, {steps} of {steps} steps"


def broken(page: Any, index: int, value: Any, **more: Any) -> dict[str, Any]:
    """Open a graph with `value` in ToMA Advanced's widget number `index`, and press Run. A user could not enter a value
    outside of the widget's range."""
    graph = workflow(**more)
    graph["nodes"][3]["widgets_values"][index] = value
    page.open(graph, "error")
    page.press_run()
    return graph
