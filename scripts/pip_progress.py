"""Describe the progress of pip."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_NOT_PROGRESS = ("WARNING:", "DEPRECATION:", "[notice]", "Looking in ")


def pip_status(folders: Sequence[Path], expected_gb: float) -> Callable[[Sequence[str]], str]:
    """Return a function that describes a running `pip install` by the lines of its log.

    folders: folders into which pip writes wheels and packages. expected_gb: their approximate final size in GB.
    """

    def status(lines: Sequence[str]) -> str:
        written = sum(size for folder in folders for size in _sizes(folder)) / 1e9
        return f"{written:.1f} of about {max(written, expected_gb):.1f} GB written  {latest(lines)}"

    return status


def latest(lines: Sequence[str]) -> str:
    """Return pip's last action without addresses and lists of packages, or an empty text if there is none."""
    actions = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(_NOT_PROGRESS)]
    return re.sub(r"\S*/|:.*", "", actions[-1]) if actions else ""


def _sizes(folder: Path | str) -> Iterator[int]:
    """Yield the bytes of each file below a folder. Files may disappear during the walk."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False).st_size
