"""Knowledge distillation methods, one algorithm a file."""
