"""Zeros inside the matrices: the stage `sparsify`, its methods, one a file, and the patterns that zeros come in."""
