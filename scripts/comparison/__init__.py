"""What `scripts/compare` is made of: the same work through several engines, each in fresh processes."""
