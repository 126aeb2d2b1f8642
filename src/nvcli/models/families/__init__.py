"""The families of decoders: one file for each, from its config.json to a `DecoderConfig`. Torch-free."""
