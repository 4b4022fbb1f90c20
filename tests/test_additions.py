"""A toy engine, task, scheme, pruning method and loss: each is one new file (or none) and one row, and all of them run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOYS = Path(__file__).parent / "additions"
COPIED = ("compress", "quantize", "distill", "prune", "export", "triton_repo", "recipes")

FILES = {  # the new file of each, and where it goes
    "onnx_reference.py": "export/engines/onnx_reference.py",
    "int6.py": "compress/schemes/int6.py",
    "cubic_error.py": "distill/losses/cubic_error.py",
    "chance.py": "prune/chance.py",
}
ROWS = {  # in each table, before this text: the row
    "compress/core/engines.py": (
        '    "tensorrt": EngineFacts(',
        '    "onnx_reference": EngineFacts(title="ONNX reference", where="CPU", library="onnx", marker="circle", cpu_only=True),\n',
    ),
    "compress/core/tasks.py": (
        '    "image-classification": Facts(',
        """    "image-regression": Facts(
        modality="image",
        answer="value",
        columns=("image", "label"),
        metrics=("pearson", "spearman"),
        auto_class="AutoModelForImageClassification",
        problem_type="regression",
        pipeline_tag="image-feature-extraction",
        example=Example(about="A value for an image.", name="my-values", data="a/b", columns="{image: image, label: label}"),
    ),
""",
    ),
    "compress/schemes/table.py": (
        '    "fp8": SchemeFacts(',
        '    "w6a16": SchemeFacts(\n        scales=scales_in("int6", "Int6Scales"), numbers="int6", precision="w6a16", activations="float", weight_bits=6,'
        " largest_weight=31\n    ),\n",
    ),
    "distill/losses/__init__.py": ("", ""),
}
RECIPE = {
    "name": "additions",
    "model": {
        "config": {
            "model_type": "vit",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 1,
        },
        "init": "random",
        "task": "image-regression",
    },
    "data": {"path": "sklearn:digits"},
    "target": {"engines": ["onnx_reference"], "batch_sizes": [1]},
    "stages": [
        {"finetune": {"epochs": 2, "learning_rate": 1.0e-3}},
        {"distill": {"student": {"layers": 1}, "losses": [{"name": "cubic_error"}], "hard_weight": 1.0, "epochs": 1}},
        {"prune": {"method": "chance", "sparsity": 0.3, "multiple_of": 8, "allocation": "uniform", "recover": {"epochs": 0.5}}},
        {"quantize": {"scheme": "w6a16", "calibration": {"rows": 32}}},
        {"export": {}},
    ],
}
