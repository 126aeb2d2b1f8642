"""This room spawns the ranks, talks to them over shared memory, and watches that they live."""
