"""Analyses a Transformer from its modules and by running it: blocks, attention, the meaning of weight axes, shapes."""
