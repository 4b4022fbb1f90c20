"""Float builds are taken from an earlier export of the store, with the same bytes and entries, and made again where anything differs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.export import Export
from export.exporter import Exporter
from export.reuse import Reuse
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.stage.context import Context
from tests.engines_inside import inside
from tests.export import sentiment
from tests.told import Told

pytestmark = pytest.mark.whole
REUSED = "reused from an earlier export"


@pytest.fixture(autouse=True)
def _engines_inside() -> Iterator[None]:
    with inside():
        yield


@pytest.fixture
def context(tmp_path: Path) -> Context:
    checkpoints = {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()}
    made = sentiment.context(tmp_path / "scratch", checkpoints, count=8)
    (tmp_path / "stages").mkdir()
    count = len(made.data.evaluation)
    answers = {name: sentiment.answers(one.path, count) for name, one in made.checkpoints.items()}
    return replace(made, shared=tmp_path / "stages", predictions=answers, progress=Told())


@pytest.fixture
def floats(context: Context) -> Context:
    """One float build for one engine, where a test is about what a build is taken or made for."""
    target = Target(engines=("onnxruntime",), sequence_lengths=(8,), threads=1)
    return replace(context, target=target, checkpoints={"baseline": context.checkpoints["baseline"]})


def exported(context: Context, out: Path, told: dict[str, Any] | None = None) -> dict[str, Any]:
    out.mkdir()
    metrics = Export(id="export").run(list(context.checkpoints.values())[-1], context, out)
    if told is not None:
        told |= metrics
    found: dict[str, Any] = json.loads((out / "export.json").read_text())
    return found


def floating(document: dict[str, Any]) -> str:
    return json.dumps([build for build in document["builds"] if build["variant"] == "baseline"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_a_second_export_takes_float_builds_and_makes_what_is_quantized(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = [{}, {}]
    assert not Export().reuses(context)
    first = exported(context, tmp_path / "first", told[0])
    assert Export().reuses(replace(context, checkpoints={"baseline": context.checkpoints["baseline"]}))  # as a plan sees it
    others = [
        replace(context, checkpoints={}),
        replace(context, checkpoints={"baseline": Artifact(context.checkpoints["baseline"].path, {"digest": "another", "parents": []})}),
        replace(context, seed=context.seed + 1),
        replace(context, forced=True),
    ]
    assert not any(Export().reuses(other) for other in others)
    made: list[str] = []
    run = Exporter.run
    monkeypatch.setattr(Exporter, "run", lambda self: made.append(self.build.name) or run(self))
    second = exported(context, tmp_path / "second", told[1])
    assert made == ["quantize-int8"]
    assert "reused" not in told[0]
    assert told[1]["reused"] == [build["folder"] for build in second["builds"] if build["variant"] == "baseline"]
    assert floating(second) == floating(first)
    for build in second["builds"]:
        name = build["folder"]
        if build["variant"] == "baseline":
            assert contents(tmp_path / "second" / name) == contents(tmp_path / "first" / name)
        assert all((tmp_path / "second" / file).is_file() for engine in build["engines"] for file in [engine["predictions"]])
    logged = context.progress.lines  # type: ignore[attr-defined]
    assert logged.count(f"    {REUSED}") == len(second["builds"]) - 1


def test_files_are_copied_where_they_cannot_be_linked(floats: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, destination: str) -> None:
        raise OSError(95, "Operation not supported", destination)

    monkeypatch.setattr("export.reuse.os.link", refuse)
    first, second = exported(floats, tmp_path / "first"), exported(floats, tmp_path / "second")
    assert floating(second) == floating(first)
    assert contents(tmp_path / "second" / "baseline-fp32") == contents(tmp_path / "first" / "baseline-fp32")


def test_an_export_that_is_forced_makes_all_builds_again(floats: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = exported(floats, tmp_path / "first")
    made: list[str] = []
    run = Exporter.run
    monkeypatch.setattr(Exporter, "run", lambda self: made.append(self.build.name) or run(self))
    exported(replace(floats, forced=True), tmp_path / "second")
    assert made == [build["folder"] for build in first["builds"]]


def test_what_was_changed_is_made_again(floats: Context, tmp_path: Path) -> None:
    first = exported(floats, tmp_path / "first")
    (kept,) = [folder for folder in (tmp_path / "stages").glob("build-*") if (folder / "baseline-fp32").exists()]
    graph = kept / "baseline-fp32" / "model.onnx"
    changed = graph.read_bytes()[:-1]
    graph.unlink()
    graph.write_bytes(changed)
    second = exported(floats, tmp_path / "second")
    assert [build["folder"] for build in second["builds"]] == [build["folder"] for build in first["builds"]]
    told = floats.progress
    assert isinstance(told, Told)
    assert any("contents differ from the manifest" in line and line.endswith("baseline-fp32 is made again") for line in told.warnings)
    assert (tmp_path / "second" / "baseline-fp32" / "model.onnx").read_bytes() != changed
    before = len(told.lines)
    exported(floats, tmp_path / "third")
    assert f"    {REUSED}" in told.lines[before:]


def test_whatever_a_build_depends_on_is_in_its_key(context: Context, tmp_path: Path) -> None:
    from export.builds import planned

    build = planned(context, "ends")[0]
    key = Reuse(context, tmp_path, {}, [1]).key(build)
    others = [
        Reuse(context, tmp_path, {}, [2]),
        Reuse(replace(context, seed=context.seed + 1), tmp_path, {}, [1]),
        Reuse(replace(context, max_length=context.max_length - 1), tmp_path, {}, [1]),
        Reuse(replace(context, target=context.target.model_copy(update={"threads": 7})), tmp_path, {}, [1]),
        Reuse(replace(context, fingerprint={"processor": "another"}), tmp_path, {}, [1]),
        Reuse(replace(context, data=replace(context.data, selection=context.data.selection.take(range(2)))), tmp_path, {}, [1]),
        Reuse(replace(context, checkpoints={**context.checkpoints, "baseline": context.checkpoints["quantize"]}), tmp_path, {}, [1]),
    ]
    keys = [other.key(build) for other in others] + [Reuse(context, tmp_path, {}, [1]).key(replace(build, precision="bf16"))]
    assert key not in keys, keys.index(key)
    assert len(set(keys)) == len(keys), [keys.index(one) for one in keys]
    served = context.target.model_copy(update={"serve": "first"})
    assert Reuse(replace(context, target=served), tmp_path, {}, [1]).key(build) == key
