"""Decoders on the fused kernels: GPT-2's and Llama's layers, whole texts at once or token by token with a cache of pages.

`parts` finds the parts of a checkpoint and proves them, `plan` is the file, `forward` runs it, `cache` keeps keys and values, and `texts`
writes answers.
"""
