"""Print the progress of a test run: the number of tests at the start, and a line every half minute."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

SECONDS = 30


class Progress:
    """Prints the number of tests and, while they run, how many are finished and which test has run longest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._total = self._done = 0
        self._since: dict[str, float] = {}

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._announce(len(ids), node.config.option.numprocesses or 1)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._announce(len(session.items), 1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._since.pop(nodeid, None)
        self._done += 1

    def _announce(self, total: int, processes: int) -> None:
        if self._total == 0 < total:
            self._total = total
            self._write(f"{total} tests, processes: {processes}; a line follows every {SECONDS} s")
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self._done < self._total:
            time.sleep(SECONDS)
            now = [f"; for {time.monotonic() - t:.0f} s: {name.split('/')[-1]}" for name, t in self._since.items()]
            self._write(f"{self._done} of {self._total} tests done{''.join(now[:1])}")

    def _write(self, text: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(text)


def register(config: pytest.Config) -> None:
    """Print the progress, but not in xdist's workers, nor with --quiet or --collect-only."""
    if not hasattr(config, "workerinput") and config.option.verbose >= 0 and not config.option.collectonly:
        config.pluginmanager.register(Progress(config), "progress")
