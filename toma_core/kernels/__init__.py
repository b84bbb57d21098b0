"""Fast kernels, chosen by `dispatch`. The plain PyTorch of `selection` and `merge` is their reference, and runs where
they do not: on CPUs, AMD and Apple GPUs, without Triton, in windows of more than 128 tokens."""
