"""`make gpu-check` without a GPU: one line; and its whole flow, with a player in the place of Docker, TensorRT and the GPUs."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import clocks, containers
from benchmarks.gpu.clocks import watching
from foundation.core.errors import InputError
from tests.export import sentiment
from tests.triton_repo.gpu.repositories import build
from triton_repo import environment
from triton_repo.gpu import wheels

RECIPE = """# A tiny classifier.
# compress run tiny.yaml
name: tiny
model: {{path: {model}, task: text-classification, head: keep}}
data: {{path: {data}, columns: {{text: text, label: label}}, max_length: 16}}
goals: {{max_drop: 0.5}}
target: {{device: cpu, engines: [onnxruntime, tensorrt], batch_sizes: [1, 4], sequence_lengths: [8], threads: 1}}
stages:
  - quantize: {{mode: ptq, calibration: {{rows: 64}}}}
  - export: {{}}
  - triton_repo: {{serve: false}}
"""


def test_without_a_gpu_it_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(containers.machine, "__defaults__", (containers.command, lambda name: None))
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("gpu-check: this machine has no NVIDIA GPU")
    assert not (tmp_path / "out").exists()


def test_without_tensorrt_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "machine", lambda: {"gpus": ["NVIDIA L4"], "driver": "580.1"})
    with pytest.raises(InputError, match=r"TensorRT is not installed.*make install CUDA=1"):
        gpu_check.check(tmp_path, "25.09")


def test_a_deployment_is_never_replaced(tmp_path):
    assert gpu_check.fresh(tmp_path, "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert gpu_check.fresh(tmp_path, "a") == tmp_path / "a-3"


@pytest.mark.slow
@pytest.mark.whole
def test_a_step_that_fails_ends_its_recipe_and_the_report_is_written(tmp_path, monkeypatch, capsys):
    def steps(name, *_):
        yield {"latency": [{"engine": "torch", "mode": "eager", "precision": "fp16", "batch": 1, "sequence": 128, "p50_ms": 1.0}]}
        raise InputError("docker run", "ended with status 1: not ready: why")

    monkeypatch.setattr(containers, "machine", lambda: {"gpus": ["NVIDIA L4"], "driver": "580.1"})
    monkeypatch.setattr("export.engines.tensorrt.absence", lambda device: None)
    monkeypatch.setattr(gpu_check, "steps", steps)
    monkeypatch.setattr(clocks, "watching", lambda file: watching(file, ["echo", "0, 90, 1980, 1980, 2619, 70.10, 33"]))
    assert gpu_check.check(tmp_path, "25.09") == 3
    document = json.loads((tmp_path / "report.json").read_text())
    assert not document["passed"]
    assert document["machine"]["command"] == "make gpu-check RELEASE=25.09"
    assert "torch" in document["machine"]["versions"]
    assert "torch finds no NVIDIA GPU that it can use" in document["kernels"]["error"]  # the process of the kernels is the real one
    assert len(document["models"]["sst2-minilm-cuda"]["latency"]) == 1
    assert "not ready: why" in (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'report.md'}"


def test_the_figures_of_the_kernels_are_those_that_their_process_wrote(tmp_path, monkeypatch):
    written = {"checked": [{"kernel": "k", "passed": True, "reason": None}]}
    asked = []

    def command(words):
        asked.append(words)
        Path(words[-1]).write_text(json.dumps(written))

    monkeypatch.setattr(containers, "command", command)
    assert gpu_check.kernel_figures(tmp_path / "new" / "kernels.json", print) == {**written, "error": None}
    assert asked == [[sys.executable, "-m", "benchmarks.gpu.figures", str(tmp_path / "new" / "kernels.json")]]


@pytest.mark.parametrize("name", gpu_check.RECIPES)
def test_its_recipes_time_every_shape_that_is_judged(name):
    from benchmarks.gpu.verdicts import EAGER_FP16, OUR_FP16, SPEED
    from compress.commands.recipes import find
    from compress.recipe import read

    recipe = read(find(name))
    assert recipe.target.device == "cuda"
    assert SPEED in gpu_check.RECIPES
    if name == SPEED:
        lengths = {*recipe.target.sequence_lengths, recipe.data.max_length}
        assert {(batch, length) for batch in recipe.target.batch_sizes for length in lengths} >= {*OUR_FP16, *EAGER_FP16}
    else:
        assert recipe.goals.max_drop is not None


class Played:
    """Docker with two GPUs of one kind: plans by the stand-in, the real server with a Python model in the place of the plan."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.servers, self.asked = folder, {}, []

    def __call__(self, words):
        from tests.triton_repo.gpu.serve_deployed import stand_in
        from triton_repo.server import TritonServer

        self.asked.append(words[1:3])
        volume = words[words.index("--volume") + 1].split(":")[0] if "--volume" in words else ""
        if words[1] == "build":
            assert Path(words[-2]).exists()
            assert list(Path(words[-1], "wheels").glob("tokenizers*.whl"))
        elif words[1] == "run" and words[-1] == containers.BUILDER:
            status, lines, _ = build(Path(volume), "89", "89")
            assert status == 0, lines
        elif words[1] == "run":
            copy = self.folder / f"served-{len(self.servers)}"
            shutil.copytree(Path(volume).parent, copy)
            stand_in(copy)
            server = TritonServer(copy / "models", environment.check(), self.folder / "log")
            self.servers[f"server-{len(self.servers)}"] = server.__enter__()
            return f"server-{len(self.servers) - 1}\n"
        elif words[1] == "port":
            return self.servers[words[2]].grpc_address + "\n"
        elif words[1] == "stop":
            self.servers[words[2]].stop()
        return ""


@pytest.mark.slow
@pytest.mark.whole
def test_the_whole_check_with_played_gpus(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for split, count in {"train": 300, "test": 40}.items():
        with (tmp_path / "data" / f"{split}.csv").open("w", newline="") as file:
            labels = [("negative", "positive")[index % 2] for index in range(count)]
            csv.writer(file).writerows([("text", "label"), *zip(sentiment.rows(count), labels, strict=True)])
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(model=sentiment.checkpoint(1), data=tmp_path / "data"))
    docker = Played(tmp_path)
    monkeypatch.setattr("compress.commands.recipes.find", lambda name: recipe)
    monkeypatch.setattr("foundation.measure.latency.MAX_SAMPLES", 30)
    monkeypatch.setattr(gpu_check, "SECONDS", 0.5)
    for name in ("build", "plans", "serving"):
        original = getattr(containers, name)
        monkeypatch.setattr(containers, name, lambda *given, original=original: original(*given, run=docker))
    monkeypatch.setattr(wheels.vendor, "__defaults__", (environment.check().python,))
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")

    found = gpu_check.measured("tiny", tmp_path / "out", "25.09", 2, print)
    assert list(found["plans"]) == ["89"]
    assert found["plans"]["89"]["parity"]["passed"]
    assert found["plans"]["89"]["int8_share"] is not None
    assert found["plans"]["89"]["rival"]["precision"] in ("fp16", "bf16")
    assert {row["engine"] for row in found["latency"]} == {"torch", "onnxruntime"}
    assert found["accuracy"]["n"] == 40
    assert found["scaling"]["one"] > 0
    assert found["scaling"]["all"] > 0
    assert found["scaling"]["gpus"] == 2
    from benchmarks.gpu.report import write_report

    machine = {"gpus": ["played"] * 2, "driver": "none", "release": "25.09", "command": "none", "versions": {}, "clocks": []}
    lines = write_report(tmp_path, machine, {"tiny": found}, {"error": None})
    assert {line.line for line in lines} >= {"parity, sm89", "int8 share, sm89", "drop of the metric in the server", "scaling to 2 GPUs"}
    json.loads((tmp_path / "report.json").read_text())
    assert [server.is_alive for server in docker.servers.values()] == [False, False]
