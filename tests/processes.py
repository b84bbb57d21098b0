import time
from contextlib import suppress

import psutil


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended. A zombie counts as ended."""
    deadline = time.monotonic() + 300
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.05)
