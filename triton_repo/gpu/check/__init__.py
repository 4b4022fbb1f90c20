"""Holds a machine with GPUs against the figures that this project asks of one: images, server, verdicts and report."""
