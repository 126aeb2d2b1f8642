"""Norms, activations, rotary positions, embeddings, step inputs."""
