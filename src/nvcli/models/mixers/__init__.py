"""What decoder layers are made of: a file for each kind of block, which alone knows the kind. Torch-free."""
