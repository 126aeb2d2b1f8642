"""Compiling and launching kernels, on every version of Triton."""
