"""Placeholder for `foundation/standalone/onnx_decoder.py`, which replaces it next to a served model."""

from foundation.standalone.onnx_decoder import OnnxDecoder

__all__ = ["OnnxDecoder"]
