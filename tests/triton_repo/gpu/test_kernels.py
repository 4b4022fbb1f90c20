"""The repository of the engine on our kernels: complete without the training environment, and it answers as torch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.triton import TritonModel
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests.export.fused import encoders
from tests.triton_repo import tiny_exports as tiny
from triton_repo.config import SETTINGS, Scheduling, from_text
from triton_repo.gpu.kernels import files, write_kernel_repository
from triton_repo.own_modules import ROOT, modules

pytest.importorskip("triton")  # the extra `kernels`, which `dev` includes
NAME, LENGTH = "quantize-int8", 12
BUILD = Build(variant="quantize", precision="int8", folder=NAME)
ENTRY = Engine(engine="torch_kernels", mode="packed", float_precision="fp32", file=f"{NAME}/plan")


def prepared(folder: Path) -> Preprocessor:
    folder.mkdir(parents=True)
    preprocessor = tiny.text_preprocessor(buckets=(6, LENGTH))
    preprocessor.save(folder)
    return preprocessor


def write(tmp_path: Path, pairs: bool = False) -> TritonModel:
    return write_kernel_repository(
        tmp_path / "repository", tmp_path, BUILD, ENTRY, pairs=pairs, batch_sizes=(2, 64), max_batch_size=4, scheduling=Scheduling(3, 700)
    )


def test_the_folder_and_its_configuration(tmp_path: Path) -> None:
    prepared(tmp_path / NAME)
    (tmp_path / NAME / "plan").write_bytes(b"a plan")
    assert write(tmp_path).written() == {
        "model": NAME,
        "variant": "quantize",
        "precision": "int8",
        "engine": "torch_kernels",
        "mode": "packed",
        "float_precision": "fp32",
    }
    folder = tmp_path / "repository" / NAME
    config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    assert config["instance_group"] == [{"kind": "KIND_GPU", "count": 3}]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == "700"
    settings = json.loads((folder / "1" / SETTINGS).read_text())
    assert settings["batch_sizes"] == [1, 2, 4]
    assert settings["properties"] == {"float_precision": "fp32", "lengths": "6 12"}
    assert sorted(path.name for path in (folder / "warmup").iterdir()) == ["12.TEXT", "6.TEXT"]
    assert (folder / "1" / "plan.safetensors").read_bytes() == b"a plan"
    assert "pip install torch triton safetensors" in (tmp_path / "repository" / "README.md").read_text()


def test_images_are_decoded_next_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    tiny.image_preprocessor().save(tmp_path / NAME)
    (tmp_path / NAME / "plan").write_bytes(b"a plan")
    write(tmp_path)
    folder = tmp_path / "repository" / NAME
    config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    assert [given["name"] for given in config["input"]] == ["IMAGE"]
    settings = json.loads((folder / "1" / SETTINGS).read_text())
    assert settings["properties"]["lengths"] == ""
    assert (folder / "1" / "image.py").is_file()
    assert [path.name for path in (folder / "warmup").iterdir()] == ["image.IMAGE"]


def test_what_it_imports_comes_along_and_nothing_of_the_training_environment() -> None:
    names = [name for _, name in files(ROOT)]
    assert len(names) == len(set(names))
    assert {"model.py", "cpu_model.py", "preprocess.py", "engine.py", "export/fused/runner.py", "export/kernels/attention.py"} <= set(names)
    assert {"export/__init__.py", "foundation/schemes/__init__.py"} <= set(names)
    assert not [
        name for name in names if name.startswith(("foundation/models", "foundation/machine", "export/engines", "export/fused/parts"))
    ]


def test_imports_are_followed_to_the_end(tmp_path: Path) -> None:
    sources = {
        "export/__init__.py": "", "export/a.py": "from export.deep import b\nimport torch\n", "export/deep/__init__.py": "",
        "export/deep/b.py": "def f():\n    import foundation.c\n", "foundation/__init__.py": "",
        "foundation/c.py": "from export.a import x\n", "export/unread.py": "",
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = modules(tmp_path / "export" / "a.py", tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in found} == sources.keys() - {"export/unread.py"}


def test_vectors_are_the_answer_of_a_model_of_vectors(tmp_path: Path) -> None:
    vectors_of(prepared(tmp_path / NAME), 5).save(tmp_path / NAME)
    (tmp_path / NAME / "plan").write_bytes(b"a plan")
    write(tmp_path)
    folder = tmp_path / "repository" / NAME
    config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    assert config["output"] == [{"name": "VECTOR", "data_type": "TYPE_FP32", "dims": ["5"]}]
    assert "`VECTOR`" in (tmp_path / "repository" / "README.md").read_text()


def vectors_of(preprocessor: Preprocessor, dimensions: int) -> Preprocessor:
    """Returns a preprocessor of a model that answers with vectors."""
    task = "sentence-embedding"
    return replace(preprocessor, labels=("vector",), task=task, response="vector", dimensions=dimensions)


def answered(tmp_path: Path, checkpoint: Path, texts: list[str]) -> dict[str, Any]:
    """Writes the repository of a checkpoint, and returns what its model answers in a process that has only its folder."""
    from export.fused.parts import plan_of
    from export.fused.plan import write_plan

    write_plan(plan_of(Checkpoint(checkpoint)), tmp_path / NAME / "plan")
    write(tmp_path)
    folder = tmp_path / "repository" / NAME
    before = sorted(path for path in folder.rglob("*"))
    config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    script = Path(__file__).with_name("serve_kernels.py")
    command = [sys.executable, "-P", str(script), str(folder / "1"), json.dumps(config), *texts]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert answer["errors"] == []
    assert answer["outside"] == []
    assert "export.fused.runner" in answer["modules"]
    assert sorted(path for path in folder.rglob("*")) == before
    return answer


TEXTS = ["a fine film", "dull", "very long and dull film"]


@pytest.mark.slow
def test_it_answers_as_torch_does_from_its_folder_alone(tmp_path: Path) -> None:
    preprocessor, checkpoint = prepared(tmp_path / NAME), encoders.checkpoint(tmp_path)
    answer = answered(tmp_path, checkpoint, TEXTS)
    logits, _ = encoders.in_torch(checkpoint, preprocessor.encode(TEXTS))
    np.testing.assert_allclose(answer["logits"], logits.numpy(), rtol=1e-3, atol=1e-3)
    assert answer["labels"] == [preprocessor.labels[index] for index in logits.argmax(dim=1)]


@pytest.mark.slow
def test_it_answers_with_vectors_from_its_folder_alone(tmp_path: Path) -> None:
    checkpoint = encoders.checkpoint(tmp_path, encoders.Shape(vectors={"dimensions": 24}))
    preprocessor = vectors_of(prepared(tmp_path / NAME), 24)
    preprocessor.save(tmp_path / NAME)
    answer = answered(tmp_path, checkpoint, TEXTS)
    vectors, _ = encoders.in_torch(checkpoint, preprocessor.encode(TEXTS))
    np.testing.assert_allclose(answer["vectors"], vectors.numpy(), rtol=1e-3, atol=1e-3)
