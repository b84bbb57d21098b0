"""Run prompts with ComfyUI's own executor, each in a fresh process.

ComfyUI is imported once, with the flags of a server. Every prompt runs in a fork of that process. Each line of stdin is
a prompt in JSON, and each line of stdout is the result of a prompt: {"status": ..., "latent": SHA-256 of the saved
latent}.
"""

import asyncio
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path


def prepare():
    """Prepare ComfyUI with all its nodes as main.py does, without its database, port and worker thread."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    import main  # isort: skip
    import nodes  # isort: skip
    import server  # isort: skip

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    prompts = server.PromptServer(loop)
    loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=True, init_api_nodes=False))
    main.hijack_progress(prompts)
    return prompts


def run(prompts, prompt):
    """Validate and execute one prompt, and return the line to print."""
    import execution
    import folder_paths

    valid = asyncio.new_event_loop().run_until_complete(execution.validate_prompt("fresh", prompt, None))
    if not valid[0]:
        return {"status": f"refused: {valid[1]} {valid[3]}"}
    executor = execution.PromptExecutor(prompts, execution.CacheType.CLASSIC, {"lru": 0, "ram": 0, "ram_inactive": 0})
    executor.execute(prompt, "fresh", {}, valid[2])
    if not executor.success:
        return {"status": str(executor.status_messages[-1])}
    (files,) = [output["latents"] for output in executor.history_result["outputs"].values() if "latents" in output]
    path = Path(folder_paths.get_output_directory()) / files[0]["subfolder"] / files[0]["filename"]
    return {"status": "success", "latent": digest(path)}


def digest(path):
    """Hash the numbers of a saved latent, but not the prompt, which the file also contains."""
    from safetensors.torch import load_file

    return hashlib.sha256(load_file(path)["latent_tensor"].numpy().tobytes()).hexdigest()


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # ComfyUI's own output must not mix with the results
    prompts = prepare()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                answer = run(prompts, json.loads(line))
            except BaseException:
                answer = {"status": traceback.format_exc()}
            print(json.dumps(answer), file=out, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
