"""How close merged pictures stay to unmerged ones, on the tiny models that really denoise: `python -m
benchmarks.fidelity`."""
