"""The Triton model of a cascade; this folder is copied into the repository. It needs numpy (1 or 2) alone."""
