"""ONNX export with Q/DQ and the engines built from it, one engine a file."""
