"""The folder outside the checkout that holds environments and ComfyUI downloads, and its lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.console import SetupError, say

TEMPORARY_PREFIX = "tmp-"


def cache_dir() -> Path:
    """Return the folder `TOMA_CACHE` if it is set, otherwise `comfyui-toma` in the user's cache folder."""
    chosen = os.environ.get("TOMA_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "comfyui-toma"


@contextmanager
def locked() -> Iterator[Path]:
    """Lock the cache for one set-up at a time and yield a temporary folder inside it.

    The temporary folder is in the cache, not in /tmp, because it gets several GB and /tmp is often small. The leftover
    folders of a killed set-up are removed here. This is safe, because only the holder of the lock uses a temporary
    folder.
    """
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write to {folder} ({error.strerror}); set TOMA_CACHE to a folder you can write"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("==> Another set-up uses the same folder; waiting for it to finish")
            fcntl.flock(handle, fcntl.LOCK_EX)
        for stale in folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY_PREFIX, ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)


def purge() -> None:
    """Remove every environment and ComfyUI download."""
    folder = cache_dir()
    if not folder.is_dir():
        say(f"Nothing to remove: {folder} does not exist")
        return
    with locked():
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.name.startswith(TEMPORARY_PREFIX):
                say(f"Removing {entry}")
                shutil.rmtree(entry)
