"""Quantization schemes: codes, scales and quantized layers, one file per scheme, and the format of quantized checkpoints."""
