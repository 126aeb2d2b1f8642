"""What runs in a rank: the ModelRunner and its parts."""
