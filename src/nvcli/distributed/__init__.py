"""Groups of ranks: how they meet, what they do together, and which part of a model each of them has."""
