"""Spawning ranks, talking to them over shared memory, and watching that they live."""
