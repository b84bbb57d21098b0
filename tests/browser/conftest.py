"""Provide fixtures: one real server, one Chromium and one page of the real frontend for all browser tests.

Screenshots go to build/screenshots. With TOMA_WRITE_SCREENSHOTS=1, screenshots for the documentation go to docs/images.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from demo.showcase_graphs import place_dit
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from tests.browser.graphs import EMPTY, node
from tests.newer import newer_pack, place_templates

SCREENSHOTS = ROOT / "build" / "screenshots"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Settings of the page: no tour at the start, and no minimap and no statistics over the nodes.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
HOW_TO = "no Chromium: on Debian or Ubuntu `apt-get install chromium`, or set TOMA_CHROMIUM to the program"
TIMEOUT = 300_000  # in ms: a page that loads in seconds on an idle machine takes minutes on a busy one
# `window.finished` counts prompts that have ended. `window.statusOf` returns the element with a node's status text.
IN_PAGE = """() => {
    window.finished = 0
    for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
        window.comfyAPI.api.api.addEventListener(kind, () => window.finished++)
    window.statusOf = id => app.graph.getNodeById(id).widgets.find(w => w.name === "toma_status").element.firstChild
}"""


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
        self.tab = browser.new_page(viewport={"width": 1600, "height": 1000})
        self.tab.set_default_timeout(TIMEOUT)
        self.tab.on("console", lambda m: m.type in ("error", "warning") and self._hear(m.type, m.text, m.location))
        self.tab.on("pageerror", lambda error: self._hear("exception", str(error), {}))

    def _hear(self, kind: str, text: str, location: dict[str, Any]) -> None:
        source = re.sub(r"^\w+://[^/]*|[?#].*", "", location.get("url", ""))
        self.noise.add((kind, re.sub(r"127\.0\.0\.1:\d+", "SERVER", text), source))

    def start(self, *, vue: bool, language: str = "en") -> None:
        """Load the page with the Vue renderer or LiteGraph's, and clear its initial graph."""
        self.renderer = "vue" if vue else "litegraph"
        self.language = language
        self.server.set_setting("Comfy.VueNodes.Enabled", vue)
        self.server.set_setting("Comfy.Locale", language)
        self.tab.goto(self.server.url)
        self.tab.wait_for_function("window.app?.graph && window.app.extensionManager?.workflow?.activeWorkflow")
        self.hear()
        self.open(EMPTY, "empty")

    def hear(self) -> None:
        """Start counting prompts that have ended."""
        self.pressed = 0
        self.tab.evaluate(IN_PAGE)

    def open(self, workflow: dict[str, Any], name: str) -> None:
        self.tab.evaluate("([w, n]) => app.loadGraphData(w, true, true, n)", [workflow, name])
        self.tab.wait_for_timeout(300)

    def evaluate(self, code: str, argument: Any = None) -> Any:
        return self.tab.evaluate(code, argument)

    def text(self, node_id: int | str) -> str:
        """Return the status text of a ToMA node."""
        return str(self.evaluate("id => window.statusOf(id).textContent", node_id))

    def verdict(self, node_id: int | str) -> str:
        """Return the first line of a node's status text."""
        return self.text(node_id).split("\n", 1)[0]

    def details(self, node_id: int | str) -> str:
        """Return the tooltip of a node's status text."""
        return str(self.evaluate("id => window.statusOf(id).title", node_id))

    def wait_for_text(self, node_id: int | str, part: str) -> None:
        self.tab.wait_for_function(
            "([id, part]) => window.statusOf(id).textContent.includes(part)", arg=[node_id, part]
        )

    def ours(self) -> set[tuple[str, str, str]]:
        """Return console errors and warnings about files of this pack."""
        return {noise for noise in self.noise if "/extensions/" in noise[1] + noise[2] or "toma" in str(noise).lower()}

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
        self.tab.wait_for_function("n => window.finished >= n", arg=self.pressed)
        self.tab.wait_for_timeout(200)

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

    def shown_image(self, filled: str) -> dict[str, str]:
        """Return the picture of a node. It must be the only node whose output has both pictures and a field
        `filled`."""
        code = "name => Object.values(app.nodeOutputs).filter(o => o[name] && o.images).map(o => o.images[0])"
        (shown,) = self.evaluate(code, filled)
        return shown  # type: ignore[no-any-return]

    def picture(self, name: str, image: dict[str, str], *, document: bool = False) -> Image.Image:
        """Save and return a picture that a node shows. document: save it for the documentation."""
        path = self._path(name, document=document)
        path.write_bytes(self.server.view(image))
        shown = Image.open(path)
        shown.load()
        _made_small(path)
        return shown

    def photograph(self, name: str, node_ids: list[int], *, document: bool = False) -> Path:
        """Save a screenshot of nodes, and return its path. document: save it for the documentation."""
        where = """ids => {
                const rects = ids.map(id => app.graph.getNodeById(id).getBounding())
                const left = Math.min(...rects.map(r => r[0])), top = Math.min(...rects.map(r => r[1]))
                const right = Math.max(...rects.map(r => r[0] + r[2]))
                const bottom = Math.max(...rects.map(r => r[1] + r[3]))
                app.canvas.deselectAll()
                app.canvas.ds.scale = 1
                app.canvas.ds.offset = [300 - left, 160 - top]  // beside the page's own menus
                app.canvas.setDirty(true, true)
                return [right - left, bottom - top]
            }"""
        self.evaluate(where, node_ids)
        self.tab.wait_for_timeout(1200)  # a visible node may still grow around its picture
        area = self.evaluate(where, node_ids)
        self.tab.set_viewport_size({"width": max(1600, int(area[0]) + 400), "height": max(1000, int(area[1]) + 300)})
        self.tab.mouse.move(5, 400)
        self.tab.wait_for_timeout(700)
        path = self._path(name, document=document)
        clip = {"x": 280, "y": 135, "width": area[0] + 40, "height": area[1] + 50}
        self.tab.screenshot(path=str(path), clip=clip)
        _made_small(path)
        return path

    def _path(self, name: str, *, document: bool) -> Path:
        # Screenshots of the documentation show the Vue renderer.
        write = document and self.renderer == "vue" and os.environ.get("TOMA_WRITE_SCREENSHOTS")
        path = ROOT / "docs" / "images" / f"{name}.png" if write else SCREENSHOTS / f"{name}-{self.renderer}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _made_small(path: Path) -> None:
    """Reduce a picture of the documentation to 256 colours, which halves the size of its file."""
    if path.parent != SCREENSHOTS:
        Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


@pytest.fixture(scope="session")
def workshop(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Run a server with the demo's nodes, stand-ins for nodes that the tested ComfyUI lacks, and a placeholder for
    every file that a template names."""
    packs = [ROOT / "demo", newer_pack(tmp_path_factory.mktemp("packs"))]
    server = ComfyServer(packs=packs, flags=["--use-pytorch-cross-attention"])
    try:
        place_templates(server)
        place_dit(server.base / "models")
        server.start()
        for name, value in SETTINGS.items():
            server.set_setting(name, value)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def baseline(browser: Any) -> set[tuple[str, str, str]]:
    """Return the console messages of ComfyUI's page without custom nodes, in both renderers."""
    with ComfyServer(flags=["--disable-all-custom-nodes"]) as plain:
        for name, value in SETTINGS.items():
            plain.set_setting(name, value)
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


@pytest.fixture(scope="module", params=["litegraph", "vue"])
def page(request: pytest.FixtureRequest, only_page: Page) -> Page:
    only_page.noise.clear()
    only_page.start(vue=request.param == "vue")
    return only_page


@pytest.fixture
def narrow(page: Page) -> Iterator[Page]:
    """Open the page in a window that is 900 pixels wide."""
    wide = page.tab.viewport_size
    page.tab.set_viewport_size({"width": 900, "height": 800})
    yield page
    page.tab.set_viewport_size(wide)


# A graph of ComfyUI's own nodes that runs without a model.
PLAIN = {
    "id": "00000000-0000-4000-8000-000000000001",
    "last_node_id": 2,
    "last_link_id": 1,
    "nodes": [
        node(1, "EmptyImage", (100, 100), [64, 64, 1, 0], outputs=[("IMAGE", [1])]),
        node(2, "PreviewImage", (500, 100), inputs=[("images", "IMAGE", 1)]),
    ],
    "links": [[1, 1, 0, 2, 0, "IMAGE"]],
    "groups": [],
    "version": 0.4,
}
