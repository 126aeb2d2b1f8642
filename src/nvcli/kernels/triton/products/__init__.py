"""Matrix products of linear layers and experts, in 16 bits, FP8 and 4 bits."""
