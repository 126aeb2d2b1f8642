"""Sums over the memory of several GPUs."""
