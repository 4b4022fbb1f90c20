"""Token dropping: which tokens leave the model after some layers, and whether they may."""
