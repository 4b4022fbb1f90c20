"""Layers that are not `nn.Linear` where they should be, and weights that stay in their files."""
