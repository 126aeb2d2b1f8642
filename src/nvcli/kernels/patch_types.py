"""Types of attention in vision towers."""

from __future__ import annotations

Runs = tuple[tuple[int, int, int], ...]
"""Runs of segments of one size: (first patch, number of segments, patches of each)."""
