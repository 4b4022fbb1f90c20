"""Knowledge distillation, one algorithm per file."""
