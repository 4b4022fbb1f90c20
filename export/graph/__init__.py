"""The ONNX graph of a checkpoint: exported, with quantize and dequantize nodes put in, and its multiply-accumulates counted."""
