"""The size of the chunks in which recurrent layers compute prompts. Torch-free."""

from __future__ import annotations

CHUNK = 64
"""Tokens of a chunk, with each of which a token has a score in each head."""
