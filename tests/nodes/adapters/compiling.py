"""Provide helpers that compile a model with ComfyUI's torch.compile node and a backend that counts graphs."""

from typing import Any


class Counting:
    """A torch.compile backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compiled(model: Any, backend: Any, inside: bool = False, keys: list[str] | None = None) -> Any:
    """Compile a model as ComfyUI's TorchCompileModel does. inside: ToMA merges inside the graph, as with Inductor."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    model = model.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=model, backend=backend, options=options, keys=keys or ["diffusion_model"])
    if inside:
        model.model_options["torch_compile_kwargs"]["backend"] = "inductor"
    return model
