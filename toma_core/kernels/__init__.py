"""Fast kernels, chosen by `dispatch`. Their reference, the plain PyTorch of `selection` and `merge`, runs in their
place on CPUs, on AMD and Apple GPUs, without Triton, and in windows of more than 128 tokens."""
