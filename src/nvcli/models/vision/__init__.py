"""Vision towers: the parts of models that turn images into embeddings of tokens."""
