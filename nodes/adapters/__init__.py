"""Adapters: the only code that knows ComfyUI's model classes and hooks. Start with `apply_toma` in `patch_model.py`."""
