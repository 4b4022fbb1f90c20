"""The main job on real data: MiniLM on SST-2, from the recipe to the served model. Needs COMPRESS_TEST_DATA (models/ and data/)."""

import json
import os
from pathlib import Path

import pytest

from compress.pipeline import run
from compress.recipe import read
from foundation.core.progress import ConsoleProgress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@pytest.fixture(scope="module")
def real() -> Path:
    return Path(os.environ["COMPRESS_TEST_DATA"])


def test_sst2_keeps_its_accuracy_at_every_hop(real: Path, tmp_path: Path) -> None:
    settings = [
        f"model.path={real / 'models' / 'minilm-sst2'}",
        f"data.path={real / 'data' / 'sst2'}",
        "data.files={train: train.tsv.gz, test: dev.tsv}",
        "data.max_length=64",  # the longest row has 55 tokens
        "target={batch_sizes: [1], sequence_lengths: [32]}",
        "goals={max_drop: 0.01, min_speedup: null, int8_faster: false}",  # no wall time decides a test
    ]
    outcome = run(read(RECIPES / "sst2-minilm-ptq.yaml", settings), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    baseline, last = report["variants"][0], report["variants"][-1]
    assert baseline["accuracy"]["torch"]["n"] == 872
    assert baseline["accuracy"]["torch"]["value"] == pytest.approx(782 / 872)
    assert last["int8_share"] >= 0.95
    for hop in ("torch", "openvino", "onnxruntime", "triton"):
        assert last["accuracy"][hop]["value"] >= baseline["accuracy"]["torch"]["value"] - 0.01, hop
    assert outcome.missed == []
