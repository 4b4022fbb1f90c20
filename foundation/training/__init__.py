"""Training: one loop for finetuning, distillation, recovery and quantization-aware training, and its objectives."""
