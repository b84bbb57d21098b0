"""What the set-up says while it works, and how it says that something is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HEARTBEAT_SECONDS = 15.0
TAIL_LINES = 25


class SetupError(Exception):
    """Something the reader of the message can put right; the message says how."""


def say(text: str) -> None:
    """One line to stderr, at once, so that the command's own output on stdout stays clean."""
    print(text, file=sys.stderr, flush=True)


def run_stage(title: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> bool:
    """Run one long command and show that it is alive; return whether it succeeded.

    On a terminal the command draws its own progress. Elsewhere its output goes to `log`, a line every 15 seconds
    says how long it has been running, how much the disk has filled and what it printed last, and if it fails the end
    of the log is shown.
    """
    say(f"==> {title}")
    start = time.monotonic()
    if sys.stderr.isatty():
        code = subprocess.run(command, env=env, stdout=sys.stderr, check=False).returncode
    else:
        environ = {**(os.environ if env is None else env), "PIP_PROGRESS_BAR": "off"}
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=environ, stdout=sink, stderr=subprocess.STDOUT)
        try:
            code = _wait_with_heartbeat(process, log, start)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code != 0:
            say("\n".join(_read_lines(log)[-TAIL_LINES:]))
    say(f"    {'done' if code == 0 else 'failed'} after {time.monotonic() - start:.0f} s")
    return code == 0


def _wait_with_heartbeat(process: subprocess.Popen[bytes], log: Path, start: float) -> int:
    free = shutil.disk_usage(log.parent).free
    while True:
        try:
            return process.wait(timeout=HEARTBEAT_SECONDS)
        except subprocess.TimeoutExpired:
            written = max(0, free - shutil.disk_usage(log.parent).free) / 1e9
            last = (_read_lines(log) or [""])[-1].strip()
            say(f"    {time.monotonic() - start:4.0f} s  {written:4.1f} GB  {last[:80]}")


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
