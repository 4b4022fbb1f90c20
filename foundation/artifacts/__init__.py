"""Files on disk: artifacts with a manifest, the run folder, and weights in safetensors files."""
