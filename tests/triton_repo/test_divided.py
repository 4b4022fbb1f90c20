"""The repository of a divided model: complete, and its ranks answer as the undivided model, in processes that have its folder alone."""

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

from export.divided.folder import write
from export.divided.frames import ANSWER, HEADER, receive, send
from export.divided.served import Engine
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.exported import Build, DividedVariant
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from tests.export import sentiment
from triton_repo.config import SETTINGS, Scheduling, from_text
from triton_repo.divided import NOT_RUN, ROOT, files, write_divided_repository
from triton_repo.triton_repo import TritonRepo

pytestmark = pytest.mark.whole

NAME = "quantize-tensor-parallel-2"
DIVIDED = DividedVariant(variant="quantize", ranks=2, folder=NAME)
BUILD = Build(variant="quantize", precision="int8", folder="quantize-int8")


def written(folder: Path) -> Path:
    """The folder of the version."""
    prepared = Checkpoint(sentiment.quantized()).preprocessor("text-classification", sentiment.LENGTH, sentiment.TARGET)
    (folder / "quantize-int8").mkdir(parents=True)
    prepared.save(folder / "quantize-int8")
    write(Checkpoint(sentiment.quantized()), folder / NAME, 2, "export.tensor_parallel")
    told = write_divided_repository(
        folder / "repository", folder, DIVIDED, BUILD, pairs=False, max_batch_size=4, scheduling=Scheduling(1, 700), threads=2
    )
    assert (told.model, told.variant, told.precision) == (NAME, "quantize", "int8")
    return folder / "repository" / NAME / "1"


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all tests read; none writes there."""
    return written(tmp_path_factory.mktemp("divided"))


def test_the_folder_and_its_configuration(version: Path) -> None:
    config = MessageToDict(from_text((version.parent / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    assert config["instance_group"] == [{"kind": "KIND_MODEL", "count": 1}]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == "700"
    assert json.loads((version / SETTINGS).read_text())["properties"] == {"ranks": "2", "threads": "1"}
    assert (version / "rank-1-of-2" / "rank.safetensors").is_file()
    assert sorted(path.name for path in (version.parent / "warmup").iterdir()) == ["16.TEXT", "8.TEXT"]
    names = [name for _, name in files(ROOT)]
    assert len(names) == len(set(names))
    assert {"model.py", "engine.py", "export/divided/worker.py", "export/divided/rank.py", "foundation/schemes/int4.py"} <= set(names)
    assert not [name for name in names if name.startswith(("foundation/stage", "foundation/training", "export/engines", "export/parity"))]


@pytest.mark.slow
def test_ranks_answer_as_the_whole_from_their_folder_alone(version: Path, tmp_path: Path) -> None:
    texts = ["a fine film", "dull", "very dull film this was not good"]
    before = sorted(version.rglob("*"))
    config = MessageToDict(from_text((version.parent / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    script = ROOT / "tests" / "triton_repo" / "gpu" / "serve_kernels.py"
    command = [sys.executable, "-P", str(script), str(version), json.dumps(config), *texts]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    assert (answer["errors"], answer["outside"]) == ([], [])
    assert sorted(version.rglob("*")) == before
    prepared = Checkpoint(sentiment.quantized()).preprocessor("text-classification", sentiment.LENGTH, sentiment.TARGET)
    expected = predict(load(sentiment.quantized()), prepared, texts, 1)
    np.testing.assert_allclose(np.array(answer["logits"], np.float32), expected, rtol=0, atol=1e-5)  # other rows in a batch, other rounding
    assert answer["labels"] == [prepared.labels[index] for index in expected.argmax(axis=1)]


@pytest.mark.slow
def test_a_killed_rank_fails_one_batch_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Checkpoint(sentiment.quantized()), tmp_path, 2, "export.tensor_parallel")
    engine = Engine(tmp_path, "dynamic", (1,), {"ranks": "2", "threads": "1"})
    prepared = Checkpoint(sentiment.quantized()).preprocessor("text-classification", sentiment.LENGTH, sentiment.TARGET)
    features: Any = prepared.encode(["a fine film"])
    try:
        first = engine.predict(features)
        engine.processes[1].kill()
        with pytest.raises(RuntimeError, match="rank"):
            engine.predict(features)
        assert engine.processes == []
        np.testing.assert_array_equal(engine.predict(features), first)
        with pytest.raises(RuntimeError, match=r"rank \d of 2: "):
            engine.predict({"input_ids": np.full((1, 4), 10**6)})  # no such token
        np.testing.assert_array_equal(engine.predict(features), first)
    finally:
        engine.close()


def test_the_stage_writes_it_for_what_the_export_has_divided(version: Path, tmp_path: Path) -> None:
    for folder in ("quantize-int8", NAME):
        (tmp_path / folder).symlink_to(version.parents[2] / folder)
    context = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()})
    parent = Artifact(tmp_path, {"id": "export", "stage": "export"})
    document: dict[str, Any] = {"builds": [BUILD.with_(engines=()).written()], "compressed_tensors": None}
    (tmp_path / "export.json").write_text(json.dumps(document))
    stage = TritonRepo(max_batch_size=4, max_queue_delay_us=700)
    assert stage._write_ranks(parent, context, tmp_path / "none") is None
    (tmp_path / "export.json").write_text(json.dumps({**document, "divided": DIVIDED.written()}))
    told = stage._write_ranks(parent, context, tmp_path / "ranks")
    assert told is not None
    assert (told.model, told.metrics, told.reason) == (NAME, {}, NOT_RUN)
    ours = tmp_path / "ranks" / NAME
    assert (ours / "config.pbtxt").read_text() == (version.parent / "config.pbtxt").read_text()
    assert stage._write_ranks(parent, replace(context, task="text-generation"), tmp_path / "language") is None


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom frames import send, ERROR, READY\n"
        "send(sys.stdout.buffer, *((ERROR, b'no part') if sys.argv[2] == '1' else (READY,)))\nsys.stdin.read()\n"
    )
    (tmp_path / "frames.py").write_text((ROOT / "export" / "divided" / "frames.py").read_text())
    engine = Engine(tmp_path, "dynamic", (1,), {"ranks": "2", "threads": "1"})
    engine.worker = script
    with pytest.raises(RuntimeError, match=r"^rank 1 of 2: no part$"):
        engine.prepare(())
    assert engine.processes == []


def test_messages_come_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "pipe"
    with file.open("wb") as stream:
        send(stream, ANSWER, b"x" * 1000)
        send(stream, ANSWER)
        stream.write(HEADER.pack(ANSWER, 5) + b"abc")
    with file.open("rb") as stream:
        assert [receive(stream) for _ in range(3)] == [(ANSWER, b"x" * 1000), (ANSWER, b""), None]
        assert receive(stream) is None
