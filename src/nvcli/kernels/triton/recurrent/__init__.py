"""Layers that keep a state: gated delta nets and short convolutions."""
