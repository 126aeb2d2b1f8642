"""Configuration, messages between processes and sampling parameters, which every room reads."""
