"""The size and cost of a model, from its configuration alone: no torch, no GPU, no weight files."""
