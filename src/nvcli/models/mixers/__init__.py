"""The blocks of decoder layers: one file for each kind, which alone knows the kind. Torch-free."""
