"""Groups of ranks: how they meet, their collectives, and how a model is divided among them."""
