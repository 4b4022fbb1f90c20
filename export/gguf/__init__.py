"""Checkpoints as GGUF, the format of llama.cpp."""
