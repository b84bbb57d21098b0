"""Adapters: the only code that knows ComfyUI's model classes and hooks. `apply_toma` (patch_model.py) is the way in."""
