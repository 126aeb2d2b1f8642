"""Processes that make the masks of structured answers."""
