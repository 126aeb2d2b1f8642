"""The AttentionBackend interface, one file per backend, and the selection."""
