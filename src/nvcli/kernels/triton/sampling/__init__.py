"""The way from logits to token ids."""
