"""LoRA adapters of PEFT: what their folders say, which tensors of a decoder they change, and the changed values."""
