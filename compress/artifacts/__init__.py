"""What lies on disk: sealed artifacts, the run folder, and weights in safetensors files."""
