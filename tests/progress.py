"""What a run of tests is doing: how much there is to do at its start, and a line whenever half a minute passes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

SECONDS = 30


class Progress:
    """Prints the number of tests, and while they run how many are done and which has run longest.

    Dots alone say little: tests that take minutes come first. `seconds`: the time between two lines.
    """

    def __init__(self, config: pytest.Config, seconds: float = SECONDS) -> None:
        self._config = config
        self._seconds = seconds
        self._total = self._done = 0
        self._since: dict[str, float] = {}
        self._stop = threading.Event()

    def announce(self, total: int, processes: int) -> None:
        """Print how many tests there are, once."""
        if self._total == 0 < total:
            self._total = total
            self._write(f"{total} tests, processes: {processes}; a line follows every {self._seconds:g} s")
            threading.Thread(target=self._watch, daemon=True).start()

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.announce(len(ids), node.config.option.numprocesses or 1)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.announce(len(session.items), 1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._since.pop(nodeid, None)
        self._done += 1

    def pytest_sessionfinish(self) -> None:
        self._stop.set()

    def line(self) -> str:
        """Return what is going on."""
        running = min(self._since.items(), key=lambda item: item[1], default=None)
        now = f"; for {time.monotonic() - running[1]:.0f} s: {running[0].split('/')[-1]}" if running else ""
        return f"{self._done} of {self._total} tests done{now}"

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            self._write(self.line())

    def _write(self, text: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(text)


def register(config: pytest.Config) -> None:
    """Watch the run in the process that prints, unless it prints little by wish."""
    if not hasattr(config, "workerinput") and config.option.verbose >= 0 and not config.option.collectonly:
        config.pluginmanager.register(Progress(config), "progress")
