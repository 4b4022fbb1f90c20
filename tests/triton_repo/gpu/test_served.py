"""A deployed GPU repository in the real server, without a network: its Python models, from the packages that lie in it and no others.

For one GPU, four of one kind and two of two kinds the plans are built by a stand-in; a Python model that knows the golden rows serves in
their place. The processes, the warm-up, the ensemble and the configurations are those of the deployment.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from foundation.artifacts.artifact import digest, file_digest, files_below
from foundation.standalone.response import RESPONSES
from tests.docker.test_docker import expressions, metrics
from tests.triton_repo.gpu.repositories import (
    BUCKETS,
    LARGEST,
    ROWS,
    build,
    logits_of,
    quantized_graph,
    record_of,
    text_preprocessor,
    write,
)
from tests.triton_repo.gpu.serve_deployed import HITS, MISSES, RUNS
from triton_repo import deployment, environment
from triton_repo.gpu import wheels

pytestmark = [pytest.mark.slow, pytest.mark.whole]
ROOT = Path(__file__).resolve().parents[3]
MACHINES = {"one": ["90"], "four of a kind": ["89"] * 4, "two and two": ["80", "80", "90", "90"]}
ONLY_WITH_A_GPU = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_power_usage"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return quantized_graph(tmp_path_factory.mktemp("bert"))


def packages(folder: Path, given: Path) -> Path:
    """A virtual environment of the wheels in a folder, as the containers install them."""
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python3"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", *map(str, sorted(given.glob("*.whl")))], check=True)
    return folder


@pytest.mark.parametrize("machine", MACHINES)
def test_a_deployment_serves_from_its_own_folder(machine, graph, tmp_path, monkeypatch):
    if subprocess.run(["unshare", "--net", "--map-root-user", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this kernel gives no network namespaces to users")
    monkeypatch.setattr(wheels, "PYTHON", environment.check().python)
    preprocessor, deployed = text_preprocessor(), tmp_path / "deployed"
    repository = deployed / "model_repository_gpu"
    logits = logits_of(graph, preprocessor, ROWS)
    write(repository, graph, preprocessor, ROWS, logits, serving={"instances": 2, "max_queue_delay_us": 200, "response_cache": True})
    monkeypatch.setattr(wheels.vendor, "__defaults__", (environment.check().python,))
    list(deployment._containers(deployed))
    files = {name: {"sha256": file_digest(path)} for name, path in files_below(deployed).items()}
    (deployed / "deployment.json").write_text(json.dumps({"schema": 1, "files": files, "digest": digest(files), "owner": {}}))
    status, lines, _ = build(repository, *MACHINES[machine])
    assert status == 0, lines
    assert deployment.problems(deployed) == []

    alone = packages(tmp_path / "packages", repository / "wheels")
    moved = shutil.move(repository, tmp_path / "elsewhere")  # nothing of the run or of the project is near
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.triton_repo.gpu.serve_deployed", str(moved), str(alone), str(tmp_path / "log")]
    inside = ["unshare", "--net", "--map-root-user", *command]
    done = subprocess.run(inside, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    assert done.returncode == 0, done.stderr[-2000:] + log[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    np.testing.assert_array_equal(np.array(found["logits"], np.float32), logits)
    wanted = RESPONSES[preprocessor.response].of(logits, preprocessor.labels)
    assert found["labels"] == [label.decode() for label in wanted["LABEL"][:, 0]]
    np.testing.assert_allclose(found["scores"], wanted["SCORE"][:, 0], atol=1e-6)

    name, (hits, misses, runs) = found["model"], (found["counts"][metric] for metric in (HITS, MISSES, RUNS))
    assert [count[name] for count in hits] == [0, len(ROWS)]  # every row came twice
    assert [count[name] for count in misses] == [len(ROWS), len(ROWS)]
    assert runs[0] == runs[1]  # nothing ran for the second answer
    assert runs[0][f"{name}_plan"] > 0

    assert re.findall(r"numpy (\d+)\.", log) == ["1"]
    warm_up = [f"[{', '.join([str((1, bucket))] * count)}]" for bucket in BUCKETS for count in (1, LARGEST)]
    assert re.findall(r"^batch (\[.*\])$", log, re.M)[: len(warm_up)] == warm_up  # a warm-up of n rows is n requests that run together
    counts = record_of(Path(moved))["serving"]
    for part in ("preprocess", "postprocess"):
        assert len(re.findall(rf"TRITONBACKEND_ModelInstanceInitialize: \S*tiny_{part}_\S* ", log)) == counts[part]["processes"]
    asked = set().union(*(metrics(expression) for expression in expressions())) - {"up"} - ONLY_WITH_A_GPU
    assert asked - {"nv_inference_request_summary_us"} <= set(found["metrics"])
