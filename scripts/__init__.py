"""Development tools: find or download ComfyUI, make the environment, run commands in it, drive a real server.

This package imports only the standard library. Only `comfy_server` and `comfy_pack` also use ComfyUI's requirements.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - an older Python has to reach this message
    raise SystemExit(
        "Python 3.10 or newer is needed, this is %d.%d. " % sys.version_info[:2]  # noqa: UP031
        + "If another one is installed, name it: make test PYTHON=python3.12"
    )
