"""The job layer: rows from files, and results into a file. It knows nothing of GPUs or tokens."""
