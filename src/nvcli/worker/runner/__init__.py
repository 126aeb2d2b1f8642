"""The ModelRunner, which runs in a rank, and its parts."""
