"""Quantization methods: int8, int4 and FP8, after training and with it, one algorithm a file."""
