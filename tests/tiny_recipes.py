"""The start of a recipe for a tiny ViT on scikit-learn's digits, from random weights: what whole runs are tested with."""

from typing import Any


def tiny_vit(name: str, layers: int = 1) -> dict[str, Any]:
    """Returns name, model and data; stages are the caller's."""
    config = {
        "model_type": "vit",
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = {"config": config, "init": "random", "task": "image-classification", "head": "new"}
    return {"name": name, "model": model, "data": {"path": "sklearn:digits"}}
