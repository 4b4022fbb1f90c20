"""Width: the residual stream in fewer channels, which are principal components of its activations."""
