"""Training: one loop for finetuning, distillation, recovery and quantization-aware training, and what it learns from."""
