"""What only a GPU can tell: facts of the card, kernels against fp64 on it, and the script of a visit to a lent one."""
