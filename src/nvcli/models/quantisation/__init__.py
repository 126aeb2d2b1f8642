"""Quantised checkpoints: what config.json says of them, and which tensors of their files make up a weight."""
