"""The repositories for NVIDIA GPUs: TensorRT plans behind an ensemble, and a model on our own kernels; `check` judges machines."""
