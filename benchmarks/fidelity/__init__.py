"""The error of merged pictures against unmerged ones, on the trained tiny models: `python -m benchmarks.fidelity`."""
