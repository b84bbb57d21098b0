"""Progress of pip in a few words and numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_INSTALLING = "Installing collected packages:"


@dataclass(frozen=True)
class PipProgress:
    """Describe a running `pip install` by its log and by the files on the disk.

    Attributes:
        environment: folder of the virtual environment that is filled.
        downloads: pip's TMPDIR, which holds wheels until they are installed.
        download_gb: approximate size of the downloads in GB.
        installed_gb: approximate size of the finished environment in GB.
    """

    environment: Path
    downloads: Path
    download_gb: float
    installed_gb: float

    def __call__(self, lines: Sequence[str]) -> str:
        """Return the status from the lines of pip's log."""
        packages = next((line for line in reversed(lines) if line.startswith(_INSTALLING)), "")
        if not packages:
            loaded = _gb(self.downloads, ".whl")  # more than expected where pip keeps a wheel twice for a moment
            return f"{loaded:.1f} of about {max(loaded, self.download_gb):.1f} GB downloaded  {latest(lines)}"
        names = packages.removeprefix(_INSTALLING).split(",")
        # The last file but one that pip writes into a package.
        done = {_normal(path.parent.name.split("-")[0]) for path in self._installed("*.dist-info/INSTALLER")}
        left = [name.strip() for name in names if _normal(name.strip()) not in done]
        now = f"unpacking {left[0]}" if left else "the last one is unpacked"
        text = f"{len(names) - len(left)} of {len(names)} packages installed, {now}"
        return f"{_gb(self.environment):.1f} of {self.installed_gb} GB  {text}"

    def _installed(self, pattern: str) -> Iterable[Path]:
        return self.environment.glob(f"lib/python*/site-packages/{pattern}")


def latest(lines: Sequence[str]) -> str:
    """Return the last line that names an action, without addresses and folders; empty if there is none."""
    shown = (line.strip() for line in reversed(lines) if line.strip() and not line.lstrip().startswith(_NOT_PROGRESS))
    return re.sub(r"\S*/", "", next(shown, ""))


_NOT_PROGRESS = ("WARNING:", "DEPRECATION:", "[notice]", "Looking in ")


def _gb(folder: Path, ending: str = "") -> float:
    """Return the size in GB of the files below a folder with this suffix; files may vanish meanwhile."""
    return sum(_sizes(folder, ending)) / 1e9


def _sizes(folder: Path | str, ending: str) -> Iterator[int]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path, ending)
                elif entry.name.endswith(ending):
                    yield entry.stat(follow_symlinks=False).st_size


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
