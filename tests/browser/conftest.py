"""Provide fixtures: one real server, one Chromium and one page of the real frontend for all browser tests.

Screenshots go to build/screenshots. With TOMA_WRITE_SCREENSHOTS=1, screenshots of the Vue renderer go to docs/images.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image

from demo.showcase_graphs import place_dit
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from tests import newer
from tests.browser.graphs import PLAIN, to_workflow

FLAGS = ["--no-sandbox", "--disable-gpu", "--use-gl=angle", "--use-angle=swiftshader"]
# Settings of the page: it shows no tour at the start, and neither a minimap nor statistics over the nodes.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
HOW_TO = "no Chromium: on Debian or Ubuntu `apt-get install chromium`, or set TOMA_CHROMIUM to the program"
TIMEOUT = 300  # in seconds: a page that loads in seconds on an idle machine takes minutes on a busy one
# `window.finished` counts prompts that have ended, `window.remaining` those that have not. `window.statusOf` returns
# the element with a node's status text.
IN_PAGE = """() => {
    const { api } = window.comfyAPI.api
    window.finished = 0
    for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
        api.addEventListener(kind, () => window.finished++)
    api.addEventListener("status", ({ detail }) => window.remaining = detail?.exec_info?.queue_remaining)
    window.statusOf = id => app.graph.getNodeById(id).widgets.find(w => w.name === "toma_status").element.firstChild
}"""
# JavaScript that waits until the view and the nodes' boxes have not changed for 20 frames.
SETTLED = """() => new Promise(done => {
    let last
    let equal = 0
    const look = () => {
        const { scale, offset } = app.canvas.ds
        const now = JSON.stringify([scale, [...offset], app.graph.nodes.map(node => [...node.getBounding()])])
        equal = now === last ? equal + 1 : 0
        last = now
        if (equal < 20) requestAnimationFrame(look)
        else done()
    }
    look()
})"""


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of Chromium. Without Chromium, skip these tests, or fail in CI."""
    names = [os.environ.get("TOMA_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(HOW_TO)
    return found


class Page:
    """A browser tab with ComfyUI's page.

    noise: (kind, text, path of the source) of console errors, console warnings and uncaught exceptions.
    """

    def __init__(self, browser: Any, server: ComfyServer) -> None:
        self.server = server
        self._browser = browser
        self.noise: set[tuple[str, str, str]] = set()
        self.tab = browser.new_page()
        self.tab.set_default_timeout(1000 * TIMEOUT)
        self.evaluate = self.tab.evaluate
        self.tab.on("console", lambda m: m.type in ("error", "warning") and self._hear(m.type, m.text, m.location))
        self.tab.on("pageerror", lambda error: self._hear("exception", str(error), {}))

    def _hear(self, kind: str, text: str, location: dict[str, Any]) -> None:
        source = re.sub(r"^\w+://[^/]*|[?#].*", "", location.get("url", ""))
        self.noise.add((kind, re.sub(r"127\.0\.0\.1:\d+", "SERVER", text), source))

    def start(self, *, vue: bool, language: str = "en") -> None:
        """Load the page with the Vue renderer or LiteGraph's, and clear its initial graph."""
        self.renderer = "vue" if vue else "litegraph"
        self.language = language
        for name, value in (SETTINGS | {"Comfy.VueNodes.Enabled": vue, "Comfy.Locale": language}).items():
            self.server.set_setting(name, value)
        self.tab.set_viewport_size({"width": 1600, "height": 1000})
        self.tab.goto(self.server.url)
        self.tab.wait_for_function("window.app?.graph && window.app.extensionManager?.workflow?.activeWorkflow")
        self.settle()
        self.hear()
        self.open({}, "empty")

    def hear(self) -> None:
        """Start counting prompts that have ended."""
        self.pressed = 0
        self.evaluate(IN_PAGE)

    def open(self, graph: dict[str, Any], name: str) -> dict[str, Any]:
        """Open a workflow, or a graph in API format. Return it as a workflow."""
        workflow = graph if "nodes" in graph else to_workflow(graph, self.server)
        self.evaluate("([w, n]) => app.loadGraphData(w, true, true, n)", [workflow, name])
        return workflow

    def settle(self) -> None:
        """Wait until the view and the nodes have stopped changing."""
        self.evaluate(SETTLED)

    def expect(self, wanted: Any, read: Callable[..., Any], *arguments: Any) -> None:
        """Wait until `read(*arguments)` returns `wanted`."""
        deadline = time.monotonic() + TIMEOUT
        while (found := read(*arguments)) != wanted and time.monotonic() < deadline:
            self.tab.wait_for_timeout(100)
        assert found == wanted

    def text(self, node_id: int | str) -> str:
        """Return the status text of a ToMA node."""
        return str(self.evaluate("id => window.statusOf(id).textContent", node_id))

    def verdict(self, node_id: int | str) -> str:
        """Return the first line of a node's status text."""
        return self.text(node_id).split("\n", 1)[0]

    def details(self, node_id: int | str) -> str:
        """Return the tooltip of a node's status text."""
        return str(self.evaluate("id => window.statusOf(id).title", node_id))

    def height(self, node_id: int) -> float:
        return float(self.evaluate("id => app.graph.getNodeById(id).size[1]", node_id))

    def set(self, node_id: int, widget: str, value: Any) -> None:
        code = """([id, name, value]) => {
            const widget = app.graph.getNodeById(id).widgets.find(w => w.name === name)
            widget.value = value
            widget.callback?.(value)
        }"""
        self.evaluate(code, [node_id, widget, value])

    def queue(self) -> None:
        self.press_run()
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        self.tab.wait_for_function("n => window.finished >= n && window.remaining === 0", arg=self.pressed)

    def press_run(self) -> None:
        with self.tab.expect_response(lambda r: r.url.endswith("/prompt") and r.request.method == "POST") as answer:
            self.tab.get_by_test_id("queue-button").first.click()
        self.pressed += answer.value.ok

    @contextmanager
    def second(self) -> Iterator[Page]:
        page = Page(self._browser, self.server)
        page.start(vue=self.renderer == "vue")
        yield page
        page.tab.close()

    def picture(self, filled: str) -> Image.Image:
        """Return the picture of the only node whose output has both pictures and the field that `filled` names."""
        code = "name => Object.values(app.nodeOutputs).filter(o => o[name] && o.images).map(o => o.images[0])"
        (image,) = self.evaluate(code, filled)
        return Image.open(io.BytesIO(self.server.view(image)))

    def photograph(self, name: str, node_id: int) -> None:
        """Save a screenshot of a node for the documentation."""
        show = """id => {
                const [left, top, width, height] = app.graph.getNodeById(id).getBounding()
                app.canvas.deselectAll()
                app.canvas.ds.scale = 1
                app.canvas.ds.offset = [300 - left, 160 - top]  // beside the page's own menus
                app.canvas.setDirty(true, true)
                return [width, height]
            }"""
        self.evaluate(show, node_id)
        self.settle()  # a visible node may still grow around its picture
        width, height = self.evaluate(show, node_id)
        self.tab.set_viewport_size({"width": max(1600, int(width) + 400), "height": max(1000, int(height) + 300)})
        self.tab.mouse.move(5, 400)
        self.settle()
        shot = self.tab.screenshot(clip={"x": 280, "y": 135, "width": width + 40, "height": height + 50})
        self.save(name, Image.open(io.BytesIO(shot)))

    def save(self, name: str, picture: Image.Image) -> None:
        """Save a picture for the documentation, with 256 colours, which halves the size of its file."""
        write = self.renderer == "vue" and os.environ.get("TOMA_WRITE_SCREENSHOTS")
        path = ROOT / "docs/images" / f"{name}.png" if write else ROOT / f"build/screenshots/{name}-{self.renderer}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.convert("RGB").quantize(256).save(path, optimize=True)


@pytest.fixture(scope="session")
def workshop(chromium: str) -> Iterator[ComfyServer]:
    """Run a server with the demo's nodes, stand-ins for nodes that the tested ComfyUI lacks, and a placeholder for
    every file that a template names."""
    server = ComfyServer(packs=[ROOT / "demo", newer.PACK], flags=["--use-pytorch-cross-attention"])
    newer.place_templates(server)
    place_dit(server.base / "models")
    with server:
        yield server


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=1000 * TIMEOUT)
        yield running
        running.close()


@pytest.fixture(scope="session")
def baseline(browser: Any) -> set[tuple[str, str, str]]:
    """Return the console messages of ComfyUI's page without custom nodes, in both renderers."""
    with ComfyServer(flags=["--disable-all-custom-nodes"]) as plain:
        page = Page(browser, plain)
        for vue in (False, True):
            page.start(vue=vue)
            page.open(PLAIN, "plain")
            page.queue()
        page.tab.close()
    return page.noise


@pytest.fixture(scope="session")
def only_page(browser: Any, workshop: ComfyServer) -> Iterator[Page]:
    page = Page(browser, workshop)
    yield page
    page.tab.close()


@pytest.fixture(scope="module", params=["litegraph en", "vue en"])
def page(request: pytest.FixtureRequest, only_page: Page) -> Page:
    """Load the page with the renderer and the language that the test's parameter names."""
    renderer, language = request.param.split()
    only_page.noise.clear()
    only_page.start(vue=renderer == "vue", language=language)
    return only_page
