"""Fast kernels, chosen by `dispatch`. The plain PyTorch of `selection` and `merge` runs in place of the kernels on
CPUs, on AMD and Apple GPUs, without Triton, and in windows of more than 128 tokens."""
