"""Model config, families, geometry, layers, linear methods, checkpoint and loader."""
