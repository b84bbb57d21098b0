"""The only code that knows ComfyUI's model classes and hooks. `apply_toma` (run.py) is the way in."""
