"""The processes that use the GPUs: the ranks, their steps, and the sums between them."""
