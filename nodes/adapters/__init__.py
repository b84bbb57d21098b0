"""The only code that knows ComfyUI's model classes and hooks. `attach` (run.py) is the way in."""
