"""Predictions, metrics, distance between models, and latency."""
