"""Spawns the ranks, talks to them over shared memory, watches that they live."""
