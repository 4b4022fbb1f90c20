"""Parity: does an engine compute what torch computed? Checked layer by layer and on predictions."""
