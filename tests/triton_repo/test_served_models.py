"""What clients call the models of a run, and what a deployment holds of them: python -m pytest tests/triton_repo/test_served_models.py"""

import json
from pathlib import Path
from typing import Any

import pytest

from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.triton import Results
from tests.triton_repo import tiny_exports as tiny
from triton_repo import deployment, layout, served_models
from triton_repo.config import from_text
from triton_repo.live import LiveRepository
from triton_repo.roll_over import configs
from triton_repo.served_models import ServedModel


def repository(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\n')
        (folder / name / "1" / "model.py").write_text("")
    return folder


def entry(model: str) -> dict[str, Any]:
    variant, precision, *_ = model.split("-")
    return {"model": model, "variant": variant, "precision": precision}


@pytest.mark.parametrize(
    ("folders", "chosen", "expected"),
    [
        (["baseline-fp32", "quantize-int8"], "baseline-fp32", {"run": "baseline-fp32"}),
        (["baseline-fp32", "quantize-int8", "quantize-fp32"], None, {"run": "quantize-int8"}),  # nothing competed: the main build
        (["baseline-fp32", "quantize-w4a16", "quantize-fp32"], None, {"run": "quantize-w4a16"}),
        (["baseline-fp32"], None, {"run": "baseline-fp32"}),
        (
            ["b-fp32-image", "b-fp32-text", "q-int8-image", "q-int8-text"],
            "q-int8-text",
            {"run-image": "q-int8-image", "run-text": "q-int8-text"},
        ),
        (["run", "quantize-int8"], "quantize-int8", {"quantize-int8": "quantize-int8"}),  # its name is that of another model
    ],
)
def test_what_is_served_has_the_name_of_the_run(folders: list[str], chosen: str | None, expected: dict[str, str], tmp_path: Path) -> None:
    results = Results.model_validate({"models": [entry(f"{name}-x") | {"model": name} for name in folders], "chosen": chosen})
    found = served_models.models_of(repository(tmp_path, *folders), results, "run")
    assert {model.name: model.folder for model in found if model.part is not None} == expected
    assert sorted(model.folder for model in found) == sorted(folders)
    assert len({model.name for model in found}) == len(found)
    others = {model.folder: model.name for model in found if model.part is None}
    assert others == {name: name for name in folders if name not in expected.values()}
    assert served_models.aliases(found) == {folder: name for name, folder in expected.items() if folder != name}


def test_a_repository_without_results_is_served_whole_under_the_names_of_its_folders(tmp_path: Path) -> None:
    found = served_models.models_of(repository(tmp_path, "a", "b"), Results(), "run")
    assert [(model.name, model.part) for model in found] == [("a", ""), ("b", "")]


def test_deployments_of_earlier_versions(tmp_path: Path) -> None:
    repository(tmp_path, "baseline-fp32", "quantize-int8")
    named = [(model.name, model.folder, model.part) for model in served_models.of_earlier_version(tmp_path, ["quantize-int8"], "run")]
    assert named == [("run", "quantize-int8", ""), ("baseline-fp32", "baseline-fp32", None)]
    assert all(model.part is not None for model in served_models.of_earlier_version(tmp_path, None, "run"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of two builds, in an artifact."""
    root = tmp_path_factory.mktemp("run")
    made = tiny.export(root / "export", tiny.text_preprocessor(), tiny.TEXTS, (("baseline", "fp32"), ("quantize", "int8")))
    models = layout.served_models(made)
    layout.write_repository(root / "made" / "model_repository", models, pairs=False, batch_sizes=(1,), chosen="quantize-int8")
    return root / "made"


@pytest.mark.parametrize("everything", [False, True])
def test_a_deployment_holds_what_is_served_alone_under_the_name_of_the_run(exported: Path, tmp_path: Path, everything: bool) -> None:
    files = {name: deployment._entry(path) for name, path in artifact.files_below(exported).items()}
    models = served_models.models_of(
        exported / "model_repository",
        Results.model_validate({"models": [entry("baseline-fp32"), entry("quantize-int8")], "chosen": "quantize-int8"}),
        "my-run",
    )
    copied = [model for model in models if everything or model.part is not None]
    written = dict(deployment._copied(Artifact(exported, {"files": files}), tmp_path, models, copied))
    names = ["baseline-fp32"] * everything + ["my-run"]
    assert sorted(path.parent.name for path in tmp_path.glob("model_repository/*/config.pbtxt")) == names
    assert written == {name: deployment._entry(path) for name, path in artifact.files_below(tmp_path).items()}
    assert from_text((tmp_path / "model_repository/my-run/config.pbtxt").read_text()).name == "my-run"
    weights = "1/openvino.bin"
    assert (tmp_path / "model_repository/my-run" / weights).read_bytes() == (
        exported / "model_repository/quantize-int8" / weights
    ).read_bytes()
    readme = (tmp_path / "model_repository/README.md").read_text()
    assert 'client.infer("my-run", tensors)' in readme
    assert "quantize-int8" not in readme
    assert ("| `baseline-fp32`" in readme) is everything


def test_examples_of_a_readme_take_what_is_left() -> None:
    models = [ServedModel("run", "a-fp32", "a-fp32", ""), ServedModel("a-fp32-text", "a-fp32-text", "a-fp32-text")]
    readme = "| `a-fp32` | 8 |\n| `a-fp32-text` | 8 |\ncurl models/a-fp32-text/generate xa-fp32\n"
    assert served_models.renamed(readme, models, models[:1]) == "| `run` | 8 |\ncurl models/run/generate xa-fp32\n"


def test_a_model_is_loaded_under_its_name_and_rolled_over_to_a_folder_of_another(tmp_path: Path) -> None:
    first, second = (repository(tmp_path / name, "quantize-int8", "baseline-fp32") for name in ("first", "second"))
    live = LiveRepository(tmp_path / "live", first, models={"run": "quantize-int8"})
    assert live.names == ["run"]
    assert from_text((tmp_path / "live/run/config.pbtxt").read_text()).name == "run"
    configs(live, "run", second / "baseline-fp32")
    candidate = live.stage("run", second / "baseline-fp32")
    assert (candidate.model, candidate.version) == ("run", "2")

    def loaded(model: str) -> tuple[str, list[int]]:
        config = from_text((tmp_path / "live" / model / "config.pbtxt").read_text())
        return config.name, list(config.version_policy.specific.versions)

    assert loaded(candidate.name) == (candidate.name, [2])
    assert loaded("run") == ("run", [1])
    live.take(candidate, live.config("run"))
    assert loaded("run") == ("run", [2])


def test_the_manifest_keeps_models(tmp_path: Path) -> None:
    models = [ServedModel("run", "run", "quantize-int8", ""), ServedModel("a", "a", "a")]
    assert served_models.read(json.loads(json.dumps(served_models.written(models)))) == models
    assert [model.role for model in models] == ["served", "a"]
