"""Rounding of weights by the error of the outputs: GPTQ and AdaRound, block after block."""
