"""Quantization methods: calibration and true-int8 post-training quantization, one algorithm a file."""
