"""Nothing wrong gets out: every change of a finished run is found before anything is reported, served or copied from it."""

import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cli import app
from compress.commands.clean import clean
from compress.commands.verify import rebuild, verify
from compress.pipeline import Outcome, run
from compress.recipe import Recipe, check
from foundation.artifacts import artifact
from foundation.artifacts.chain import CHAIN, write_chain
from foundation.artifacts.run_folder import UNFINISHED, open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.seldom import seldom
from tests.tiny_recipes import tiny_vit
from triton_repo import deployment, served_models

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside", "no_clocks")]

RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [{"finetune": {"epochs": 0.2, "learning_rate": 1e-3}}, {"export": {}}, {"triton_repo": {"serve": False}}],
}
QUIET = ConsoleProgress("quiet")


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return check(RAW)


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(recipe, tmp_path_factory.mktemp("runs") / "tiny", progress=QUIET)


@pytest.fixture
def copy(finished: Outcome, tmp_path: Path) -> Path:
    shutil.copytree(finished.folder, tmp_path / "tiny", symlinks=True)
    return tmp_path / "tiny"


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): artifact.file_digest(path) for path in folder.rglob("*") if path.is_file()}


def only(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def forge(manifest: Path, **changes: Any) -> None:
    """Changes entries of a manifest and seals it anew, as a forger would."""
    document = {**json.loads(manifest.read_text()), **changes}
    manifest.write_text(json.dumps({**document, artifact.SEAL: artifact._sealed(document)}))


def relink(folder: Path, target: str) -> None:
    (folder / "model_repository").unlink()
    (folder / "model_repository").symlink_to(target)


def replace_link(folder: Path) -> None:
    target = (folder / "model_repository").resolve()
    (folder / "model_repository").unlink()
    shutil.copytree(target, folder / "model_repository")


def edit_recipe(folder: Path) -> None:
    path = folder / "recipe.lock.yaml"
    path.write_text(path.read_text().replace("max_length: ", "max_length:  ", 1))


def bind(folder: Path) -> None:
    os.mknod(repository(folder) / "s", stat.S_IFSOCK)


def repository(folder: Path) -> Path:
    return only(folder, "stages/triton_repo-*/model_repository")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "predictions": (lambda run: flip(only(run, "stages/evaluate-*/torch.safetensors")), "torch.safetensors: contents differ"),
    "metrics": (lambda run: forge(only(run, "stages/evaluate-*/manifest.json"), metrics={"n": 1}), "manifest.json: changed since"),
    "parents": (lambda run: forge(only(run, "stages/export-*/manifest.json"), parents=["x"]), "manifest.json: changed since"),
    "config": (lambda run: forge(only(run, "stages/finetune-*/manifest.json"), config={}), "manifest.json: changed since"),
    "recipe": (edit_recipe, "recipe.lock.yaml: changed since"),
    "golden rows": (lambda run: flip(run / "golden.safetensors"), "golden.safetensors: changed since"),
    "flips": (lambda run: (run / "flips.jsonl").write_text("{}\n"), "flips.jsonl: changed since"),
    "no flips": (lambda run: (run / "flips.jsonl").unlink(), "flips.jsonl: missing since"),
    "chain": (lambda run: (run / CHAIN).write_text('{"anchor": "0", "files": [], "model_repository": null}'), "its anchor"),
    "no link": (lambda run: (run / "model_repository").unlink(), "model_repository: missing"),
    "link elsewhere": (lambda run: relink(run, "/usr"), "model_repository: leads to /usr"),
    "folder for link": (replace_link, "model_repository: is not a link"),
    "link to a file": (lambda run: (repository(run) / "README").symlink_to("README.md"), "README: is a link"),
    "link to a folder": (lambda run: (repository(run) / "other").symlink_to("/usr"), "other: is a link to /usr"),
    "empty folder": (lambda run: (repository(run) / "model").mkdir(), "model: an empty folder"),
    "socket": (bind, "s: is neither a file nor a folder"),
    "added file": (lambda run: (repository(run) / "x").touch(), "x: not in the manifest"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_was_changed_is_named_and_not_reported_served_or_copied(name: str, copy: Path, tmp_path: Path) -> None:
    change, line = DAMAGE[name]
    report = (copy / "report.json").read_bytes()
    change(copy)
    problems = [str(problem) for problem in verify(copy, log=silent)]
    assert any(line in problem for problem in problems), problems
    with pytest.raises(InputError, match=r"no report is written|damaged") as caught:
        rebuild(copy)
    assert any(line in problem for problem in caught.value.lines)
    assert (copy / "report.json").read_bytes() == report
    if name not in ("predictions",):  # not part of what is served; the others are the repository, or what vouches for it
        with pytest.raises(InputError):
            deployment.repository_of(copy)
        with pytest.raises(InputError):
            deployment.deploy(copy, tmp_path / "out", silent)
        assert not (tmp_path / "out").exists()


SELDOM = ("golden rows", "no flips", "link elsewhere", "link to a file", "empty folder", "socket", "config", "metrics", "recipe")
"""Damage that is mended on the same ways as other damage; left to the slow tests."""


@pytest.mark.parametrize("name", seldom(DAMAGE, SELDOM))
def test_a_run_mends_every_damage(name: str, copy: Path, recipe: Recipe, finished: Outcome) -> None:
    DAMAGE[name][0](copy)
    if name == "folder for link":  # somebody's folder is never removed
        with pytest.raises(InputError, match="model_repository: is not a link"):
            run(recipe, copy, progress=QUIET)
        shutil.rmtree(copy / "model_repository")
    again = run(recipe, copy, progress=QUIET)
    assert verify(copy, log=silent) == []
    assert again.report["variants"][0]["accuracy"] == finished.report["variants"][0]["accuracy"]


def test_the_anchor_stands_in_report_page_and_chain(finished: Outcome) -> None:
    anchor = finished.report["integrity"]["anchor"]
    assert len(anchor) == 64
    assert json.loads((finished.folder / CHAIN).read_text())["anchor"] == anchor
    assert anchor in (finished.folder / "report.html").read_text()
    assert finished.report["integrity"]["page_sha256"] == hashlib.sha256((finished.folder / "report.html").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("report.json", '"n": ', '"n": 1', "report.json: variants: not what the files of the run say"),
        ("report.json", '"name": "tiny"', '"name": "better"', "report.json: name: not what"),
        ("report.json", "{", "", "report.json: cannot be read"),
        ("report.html", "</h1>", "!</h1>", "report.html: not the page that was written with report.json"),
    ],
)
def test_a_forged_report_is_found_and_written_again(file: str, old: str, new: str, line: str, copy: Path) -> None:
    path = copy / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    problems = [str(problem) for problem in verify(copy, log=silent)]
    assert any(line in problem for problem in problems), problems
    rebuild(copy)
    assert verify(copy, log=silent) == []


def test_a_forger_of_the_whole_run_is_found_by_a_kept_report(copy: Path, finished: Outcome, tmp_path: Path) -> None:
    kept = shutil.copy(finished.folder / "report.json", tmp_path / "kept.json")
    assert verify(copy, report=kept, log=silent) == []
    manifest = only(copy, "stages/evaluate-*/manifest.json")
    forge(manifest, seconds=0.001)
    write_chain(open_run(copy))
    rebuild(copy)
    assert verify(copy, log=silent) == []  # consistent in itself
    result = CliRunner().invoke(app, ["verify", str(copy), "--report", str(kept)])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [f"{manifest}: changed since {kept}"]


def test_a_kept_report_finds_other_figures_in_the_report_of_the_run(copy: Path, finished: Outcome) -> None:
    kept = finished.folder / "report.json"
    path = copy / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "warnings": ["none"]}))
    assert [str(problem) for problem in verify(copy, report=kept, log=silent)] == [f"{path}: warnings: not what {kept} says"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda report: report.pop("integrity"), "has no anchor, so it was written by an earlier version"),
        (lambda report: report["integrity"].update(anchor="0" * 64), "its anchor"),
        (lambda report: report["integrity"]["files"].pop(), "its anchor"),
    ],
)
def test_a_kept_report_without_a_good_anchor_is_refused(change: Callable[[Any], Any], line: str, finished: Outcome, tmp_path: Path) -> None:
    report = json.loads((finished.folder / "report.json").read_text())
    change(report)
    (tmp_path / "kept.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match=line):
        verify(finished.folder, report=tmp_path / "kept.json", log=silent)


def test_a_run_of_an_earlier_version_says_so_and_is_found_finished(copy: Path, recipe: Recipe) -> None:
    (copy / CHAIN).unlink()
    for path in copy.glob("stages/*/manifest.json"):
        document = json.loads(path.read_text())
        del document[artifact.SEAL]
        path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"chain.json: missing: an earlier version finished this run") as caught:
        rebuild(copy)
    assert len(caught.value.lines) == 1
    assert any("an earlier version finished this run" in str(line) for line in verify(copy, log=silent))
    again = run(recipe, copy, progress=QUIET)
    assert all(stage["cached"] for stage in again.report["stages"])
    assert verify(copy, log=silent) == []


def test_a_lock_file_that_leads_elsewhere_is_damage(copy: Path) -> None:
    path = copy / "recipe.lock.yaml"
    document = yaml.safe_load(path.read_text())
    document["stages"][0]["artifact"] = "../tiny/stages/x"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match=r"recipe.lock.yaml: damaged \(stages\[0\].artifact"):
        open_run(copy)


def test_commands_of_the_report_are_safe_to_paste(finished: Outcome, tmp_path: Path) -> None:
    moved = tmp_path / "a $(touch PWNED) b"
    shutil.copytree(finished.folder, moved, symlinks=True)
    for command in rebuild(moved).commands:
        assert str(moved) in " ".join(shlex.split(command))
        assert shlex.split(command)[0] == "compress"


# --- clean


@pytest.mark.slow
def test_clean_spares_a_stopped_run_and_its_checkpoints(copy: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = check({**RAW, "seed": 5})

    def fail(folder: Path, **fields: Any) -> None:
        if fields["id"] == "export":
            raise KeyboardInterrupt
        real(folder, **fields)

    real = artifact.seal
    monkeypatch.setattr(artifact, "seal", fail)
    with pytest.raises(KeyboardInterrupt):
        run(newer, copy, progress=QUIET)
    started = (copy / UNFINISHED).read_text().split()
    assert [name.rpartition("-")[0] for name in started] == ["model", "finetune", "evaluate-finetune", "export"]
    scratch = copy / "stages" / f".{started[-1]}.scratch"
    scratch.mkdir(exist_ok=True)
    stranger = copy / "stages" / "quantize-00000000"
    stranger.mkdir()
    assert clean(copy) == [stranger]
    assert scratch.exists()
    monkeypatch.undo()
    again = run(newer, copy, progress=QUIET)
    assert [stage["cached"] for stage in again.report["stages"][:3]] == [True, True, True]
    assert not (copy / UNFINISHED).exists()
    assert {path.name.partition("-")[0] for path in clean(copy)} >= {"finetune", "export", "triton_repo"}
    assert verify(copy, log=silent) == []


@pytest.mark.parametrize("verb", ["clean", "report", "bench", "verify", "serve"])
def test_a_folder_that_does_not_exist_is_not_created(verb: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [verb, str(tmp_path / "absent")])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "not a finished run" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_without_a_repository_leaves_no_link_of_an_earlier_one(copy: Path) -> None:
    run(check({**RAW, "stages": RAW["stages"][:2]}), copy, progress=QUIET)
    assert not os.path.lexists(copy / "model_repository")
    assert verify(copy, log=silent) == []


# --- deploy


def test_a_deployment_stands_alone_and_the_run_is_untouched(copy: Path, tmp_path: Path) -> None:
    before, [served] = contents(copy), served_models.divided(deployment.models_in(copy), everything=False)[0]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["deploy", str(copy), str(out)])
    assert result.exit_code == 0, result.output
    assert contents(copy) == before
    shutil.rmtree(copy)
    files = contents(out)
    copied, own = "model_repository/tiny/", f"/model_repository/{served.folder}/"
    expected = {name.split(own)[1]: digest for name, digest in before.items() if own in name}
    found = {name.removeprefix(copied): digest for name, digest in files.items() if name.startswith(copied)}
    assert {name for name in expected if found.get(name) != expected[name]} == {"config.pbtxt"}  # it says the name
    assert found.keys() == expected.keys()
    assert {name for name in files if name.startswith("model_repository/")} == {f"{copied}{name}" for name in found} | {
        "model_repository/README.md"
    }
    document = json.loads((out / "deployment.json").read_text())
    assert document["chosen"] == [model.name for model in served_models.divided(deployment.models_in(out), everything=False)[0]] == ["tiny"]
    assert document["models"][0]["build"] == served.build
    assert document["owner"]["run"] == "tiny"
    assert document["owner"]["anchor"] in (out / "README.md").read_text()
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert verify(out, log=silent) == []
    assert deployment.repository_of(out) == out / "model_repository"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda out: (out / "model_repository" / "README.md").write_text("x"), "model_repository/README.md: changed"),
        (lambda out: (out / "README.md").unlink(), "README.md: missing"),
        (lambda out: (out / "model_repository" / "x").touch(), "model_repository/x: not in deployment.json"),
        (lambda out: (out / "model_repository" / "x").symlink_to("/usr"), "model_repository/x: is a link"),
        (lambda out: (out / "deployment.json").write_text("{}"), "deployment.json: damaged"),
    ],
)
def test_a_changed_deployment_is_found_not_served_and_not_replaced(
    change: Callable[[Path], Any], line: str, finished: Outcome, tmp_path: Path
) -> None:
    out = deployment.deploy(finished.folder, tmp_path / "out", silent)
    deployment.deploy(finished.folder, out, silent)  # an unchanged one is replaced
    change(out)
    for work in (lambda: verify(out, log=silent), lambda: deployment.deploy(finished.folder, out, silent)):
        try:
            problems = [str(problem) for problem in work()]
        except InputError as error:
            problems = list(error.lines)
        assert any(line in problem for problem in problems), problems
    with pytest.raises(InputError, match="deploy the run again"):
        deployment.repository_of(out)


def test_a_deployment_goes_only_where_nothing_is_lost(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for place in (copy, copy / "out", copy / "stages", tmp_path, tmp_path / "full", tmp_path / "file", tmp_path / "link"):
        with pytest.raises(InputError, match="give a"):
            deployment.deploy(copy, place, silent)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    assert verify(copy, log=silent) == []


def test_a_deployment_says_which_goals_were_missed(copy: Path, tmp_path: Path) -> None:
    report = json.loads((copy / "report.json").read_text())
    goals = [
        {"goal": "max_size_mb", "limit": 1.0, "value": 2.0, "met": False},
        {"goal": "max_drop", "limit": 0.5, "value": 0.0, "met": True},
    ]
    (copy / "report.json").write_text(json.dumps({**report, "goals": goals}))
    result = CliRunner().invoke(app, ["deploy", str(copy), str(tmp_path / "out"), "--all"])
    assert result.exit_code == 0, result.output
    [warning] = [line for line in result.stdout.splitlines() if line.startswith("warning: missed: ")]
    assert [f"warning: {line}" for line in deployment.missed_goals(tmp_path / "out")] == [warning]
    assert len(json.loads((tmp_path / "out" / "deployment.json").read_text())["models"]) == len(deployment.models_in(copy))


def test_a_deployment_of_a_run_that_was_not_served_has_no_golden_rows(finished: Outcome, tmp_path: Path) -> None:
    out = deployment.deploy(finished.folder, tmp_path / "out", silent)
    with pytest.raises(InputError, match="give the run folder for --live"):
        verify(out, live=True, log=silent)
    with pytest.raises(InputError, match="no golden rows to check a new version with"):
        deployment.golden_labels(out)
    with pytest.raises(InputError, match="no model repository"):
        deployment.deploy(run(check({**RAW, "stages": RAW["stages"][:1]}), tmp_path / "r", progress=QUIET).folder, tmp_path / "o", silent)
