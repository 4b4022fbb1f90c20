"""`compress serve` loads what was chosen, and every model with --all: python -m pytest tests/triton_repo/test_chosen.py"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress.commands import serve as command
from foundation.artifacts import artifact
from tests.problems import raises_problem
from triton_repo import deployment, serving
from triton_repo.live import LiveRepository
from triton_repo.service import Service

NAMES = ("baseline-fp32", "quantize-int8", "quantize-w4a16")
MODELS = [
    {"name": "x", "folder": "quantize-int8", "build": "quantize-int8", "part": ""},
    *({"name": name, "folder": name, "build": name, "part": None} for name in ("baseline-fp32", "quantize-w4a16")),
]


def repository(folder: Path) -> Path:
    for name in NAMES:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\n')
        (folder / name / "1" / "model.py").write_text("")
    return folder


def deployed(folder: Path, **more: Any) -> Path:
    """A deployment as `deploy` writes it."""
    repository(folder / "model_repository")
    files = {name: deployment._entry(path) for name, path in artifact.files_below(folder).items()}
    document = {"schema": 1, "owner": {"run": "run"}, "files": files, "digest": artifact.digest(files), **more}
    (folder / deployment.MANIFEST).write_text(json.dumps(document))
    return folder


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[tuple[str, ...], list[str]]:
    """Returns which models the server is to load, and what is said."""
    servers: list[Service] = []
    said: list[str] = []
    monkeypatch.setattr(command, "serve_repository", lambda server, say: servers.append(server))
    monkeypatch.setattr(serving.environment, "check", lambda: SimpleNamespace(versions={}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    command.serve(folder, said.append, **given)
    return servers[0].models, said


@pytest.mark.parametrize(
    ("manifest", "given", "expected"),
    [
        ({"chosen": ["quantize-int8"]}, {}, ("run",)),
        ({"chosen": ["quantize-int8"]}, {"everything": True}, ("run", "baseline-fp32", "quantize-w4a16")),
        ({"chosen": ["x"], "models": MODELS}, {}, ("x",)),
        ({"chosen": ["x"], "models": MODELS}, {"everything": True}, ("x", "baseline-fp32", "quantize-w4a16")),
        ({"chosen": None}, {}, NAMES),
        ({}, {}, NAMES),  # of an earlier version
    ],
)
def test_the_chosen_model_is_loaded_and_all_where_none_was_chosen(
    manifest: dict[str, Any], given: dict[str, Any], expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, said = served(deployed(tmp_path / "folder", **manifest), monkeypatch, **given)
    assert models == expected
    left = ["baseline-fp32", "quantize-w4a16"] * (len(expected) == 1)
    assert said == [f"not loaded: {', '.join(left)}; give --all to load every model, not only the served ones"] * bool(left)


def test_a_chosen_model_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_problem("model_repository", "no other", "baseline-fp32, quantize-int8, quantize-w4a16"):
        served(deployed(tmp_path / "folder", chosen=["other"]), monkeypatch)


def test_triton_is_given_what_is_loaded_alone(tmp_path: Path) -> None:
    source = repository(tmp_path / "repository")
    assert LiveRepository(tmp_path / "one", source, models={"x": "quantize-int8"}).names == ["x"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir() if path.is_dir()) == ["x"]
    assert LiveRepository(tmp_path / "all", source).names == sorted(NAMES)
