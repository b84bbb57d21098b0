"""Real ComfyUI models for tests and benchmarks: small ones, full-size ones, and stand-ins for packages and models that
a machine lacks."""
