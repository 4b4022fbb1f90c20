"""Masks learned together with the weights: joint L0 masks and movement, and the training that they share."""
