"""Tokens that leave the model behind some layers: which ones, and whether they may."""
