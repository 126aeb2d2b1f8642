"""What a model weighs and costs, from its configuration alone: no torch, no GPU, no files of weights."""
