"""Fast kernels, chosen by `dispatch`. Without them the plain PyTorch of `selection` and `merge` runs,
which is their reference: on CPUs, AMD and Apple GPUs, without Triton, in windows of more than 128 tokens."""
