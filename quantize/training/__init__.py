"""Quantization-aware training: the int8 layers that learn, and their training."""
