"""Code that writes, starts, checks and load-tests a Triton model repository."""
