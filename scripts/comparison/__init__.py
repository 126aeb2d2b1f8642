"""The parts of `scripts/compare`: the same work through several engines, each in fresh processes."""
