"""The GPU kernels compiled for every target, without a GPU: what came out, against budgets."""
