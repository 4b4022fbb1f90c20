"""Number formats of quantized models: their codes, scales and exact products, one scheme a file, and how a checkpoint keeps them."""
