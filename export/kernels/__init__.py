"""Fused GPU kernels in the Triton language, one file each. They need the extra `kernels`; nothing else imports them.

Every file holds a kernel and its launch; `benchmarks/gpu/references.py` does the same operations in the same order in torch, for checks.
`Launch` is what both launching and compiling ahead of time read, so that what is examined without a GPU is what runs on one.
"""
