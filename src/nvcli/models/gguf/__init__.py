"""Models in GGUF, llama.cpp's format: files, config.json, tokenizer and tensors as other checkpoints have them."""
