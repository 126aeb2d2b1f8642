"""Heads that draft tokens from a model's own hidden states, as modules."""
