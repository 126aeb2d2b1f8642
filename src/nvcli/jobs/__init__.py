"""The job layer: JSONL in, JSONL out. Knows nothing of GPUs or tokens."""
