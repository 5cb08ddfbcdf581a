"""Kernels for NVIDIA and AMD GPUs, one file per op, one source for all targets.
"""
