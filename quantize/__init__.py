"""Quantization to int8, int4 and FP8, post-training and quantization-aware, one algorithm per file."""
