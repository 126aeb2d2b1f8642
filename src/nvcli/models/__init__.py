"""Model config, registry, layers, tensor-parallel layers, loader, one file per family."""
