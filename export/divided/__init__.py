"""A quantized model divided over several devices that share each layer (tensor parallelism): its folders, and its forward pass."""
