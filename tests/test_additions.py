"""A toy engine, task, scheme, pruning method and loss: each is one new file (or none) and one row, and all of them run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TOYS = Path(__file__).parent / "additions"
COPIED = ("compress", "quantize", "distill", "prune", "export", "triton_repo", "recipes")

FILES = {  # the new file of each, and where it goes
    "onnx_reference.py": "export/engines/onnx_reference.py",
    "int6.py": "compress/schemes/int6.py",
    "cubic_error.py": "distill/losses/cubic_error.py",
    "chance.py": "prune/chance.py",
}
ROWS = {  # by table: the text that a row goes before, and the row
    "compress/core/engines.py": [
        (
            '    "tensorrt": EngineFacts(',
            '    "onnx_reference": EngineFacts(title="ONNX reference", where="CPU", library="onnx", marker="circle", cpu_only=True),\n',
        )
    ],
    "compress/core/tasks.py": [
        (
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
        )
    ],
    "compress/schemes/table.py": [
        (
            '    "fp8": SchemeFacts(',
            """    "w6a16": SchemeFacts(
        scales=scales_in("int6", "Int6Scales"),
        numbers="int6",
        precision="w6a16",
        activations="float",
        weight_bits=6,
        largest_weight=31,
    ),
""",
        )
    ],
    "prune/methods.py": [
        ("from prune.fisher import fisher\n", "from prune.chance import chance\n"),
        ('    "joint": MethodFacts(),', '    "chance": MethodFacts(chance),\n'),
    ],
    "distill/presets.py": [
        ("from distill.losses.distilbert import", "from distill.losses.cubic_error import CubicError\n"),
        ("SoftTarget | Cosine |", "CubicError | "),
    ],
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


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with the new files and rows."""
    folder = tmp_path_factory.mktemp("house")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "cli.py", folder / "cli.py")
    for source, destination in FILES.items():
        assert not (folder / destination).exists()
        shutil.copyfile(TOYS / source, folder / destination)
    for table, rows in ROWS.items():
        text = (folder / table).read_text(encoding="utf-8")
        for before, row in rows:
            assert text.count(before) == 1, (table, before)
            text = text.replace(before, row + before)
        (folder / table).write_text(text, encoding="utf-8")
    return folder


def compress(house: Path, *arguments: str) -> str:
    """Runs the command of the copied house."""
    environment = {**os.environ, "PYTHONPATH": str(house), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "cli.py", *arguments], cwd=house, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return done.stdout


def test_new_rows_are_listed(house: Path) -> None:
    listed = {what: compress(house, "list", what) for what in ("engines", "tasks", "methods")}
    assert "onnx_reference" in listed["engines"]
    assert "image-regression" in listed["tasks"]
    assert "chance" in listed["methods"]
    assert "w6a16" in listed["methods"]


def test_all_of_them_run_in_one_recipe(house: Path) -> None:
    (house / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    compress(house, "run", "recipe.yaml", "--out", "run", "--quiet")
    report = json.loads((house / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["metric"]["name"] == "pearson"
    last = report["variants"][-1]
    assert last["stages"] == ["finetune", "distill", "prune", "quantize"]
    assert last["quantization"]["scheme"] == "w6a16"
    assert [variant["pruning"]["method"] for variant in report["variants"] if variant["pruning"]] == ["chance"]
    cells = {hop: cell["value"] for hop, cell in last["accuracy"].items() if cell.get("value") is not None}
    assert set(cells) == {"torch", "onnx_reference"}
    assert abs(cells["torch"] - cells["onnx_reference"]) < 1e-3
    timed = {(row["engine"], row["precision"]) for variant in report["variants"] for row in variant["latency"]}
    assert {("onnx_reference", "w6a16"), ("onnx_reference", "fp32")} <= timed
