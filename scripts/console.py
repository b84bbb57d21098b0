"""Messages, progress and errors of the set-up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HEARTBEAT_SECONDS = 15.0
TERMINAL_SECONDS = 3.0
TAIL_LINES = 25


class SetupError(Exception):
    """An error that the user can fix. The message explains how."""


def say(text: str) -> None:
    """Print one line to stderr, unbuffered. stdout holds only the command's own output."""
    print(text, file=sys.stderr, flush=True)


def last_line(lines: Sequence[str]) -> str:
    """Return the last line of a log."""
    return lines[-1].strip() if lines else ""


def run_stage(
    title: str,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    status: Callable[[Sequence[str]], str] = last_line,
) -> bool:
    """Run one long command with a progress line, and return whether it succeeded.

    The output of the command goes to `log`. The progress line shows elapsed time and status. On a terminal the line is
    overwritten. Elsewhere it is printed every 15 seconds. If the command fails, the end of the log is printed. status:
    returns the text of the status, given the lines of the log.
    """
    say(f"==> {title}")
    start = time.monotonic()
    environ = {**(os.environ if env is None else env), "PIP_PROGRESS_BAR": "off"}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environ, stdout=sink, stderr=subprocess.STDOUT)
    try:
        code = _wait_with_heartbeat(process, start, lambda: status(_read_lines(log)))
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0:
        say("\n".join(_read_lines(log)[-TAIL_LINES:]))
    say(f"    {'done' if code == 0 else 'failed'} after {time.monotonic() - start:.0f} s")
    return code == 0


def _wait_with_heartbeat(process: subprocess.Popen[bytes], start: float, status: Callable[[], str]) -> int:
    terminal = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1 if terminal else 120
    while True:
        try:
            code = process.wait(timeout=TERMINAL_SECONDS if terminal else HEARTBEAT_SECONDS)
        except subprocess.TimeoutExpired:
            text = f"    {time.monotonic() - start:4.0f} s  {status()}"[:width]
            if terminal:
                sys.stderr.write(f"\r{text.ljust(width)}")
                sys.stderr.flush()
            else:
                say(text)
        else:
            if terminal:
                sys.stderr.write(f"\r{' ' * width}\r")
            return code


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
