"""Unstructured, N:M and block sparsity: the stage `sparsify`, its methods, one a file, and the sparsity patterns."""
