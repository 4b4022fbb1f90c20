"""What the report of a finished run says of the run itself: when, by which version, on which rows."""

import importlib.metadata
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.report import report
from foundation.artifacts import artifact
from foundation.artifacts.chain import DATA, write_chain
from foundation.artifacts.run_folder import LOCK_FILE, open_run
from foundation.core.errors import InputError
from tests.hostile.finished_runs import write_run
from tests.plain_reports import render


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def change(folder: Path, *gone: str, **values: Any) -> None:
    """Writes the lock file with other values, as another version would have."""
    document = yaml.safe_load((folder / LOCK_FILE).read_text())
    (folder / LOCK_FILE).write_text(yaml.safe_dump({key: value for key, value in document.items() if key not in gone} | values))
    write_chain(open_run(folder))


def test_the_report_says_when_the_run_finished_and_with_which_version(folder: Path) -> None:
    made = report.write(folder).written()
    written = datetime.strptime(made["created"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - written) < timedelta(hours=1)
    assert made["compress"] == importlib.metadata.version("compress-transformers")
    assert report.write(folder).created == made["created"], "it is the run's, not that of `compress report`"
    page = render(made)
    assert written.strftime("%Y-%m-%d %H:%M UTC") in page
    assert f"compress {made['compress']}" in page


def test_runs_of_versions_that_did_not_write_them_have_neither(folder: Path) -> None:
    change(folder, "finished", "compress")
    made = report.write(folder).written()
    assert not {"created", "compress"} & made.keys()
    assert report.forgeries(open_run(folder)) == []
    assert "UTC" not in render(made)


def test_the_sizes_of_the_splits_belong_to_the_chain(folder: Path) -> None:
    assert "data" not in report.write(folder).written()
    splits = [{"split": "train", "rows": 30, "longest": 9, "truncated": 3}]
    artifact.write_json(folder / DATA, {"schema": 1, "key": "k", "splits": splits})
    write_chain(open_run(folder))
    made = report.write(folder).written()
    assert made["data"] == splits
    assert DATA in {entry["path"] for entry in made["integrity"]["files"]}
    (folder / DATA).write_text("{}")
    with pytest.raises(InputError, match=r"data.json: changed"):
        report.write(folder)
    (folder / DATA).unlink()
    with pytest.raises(InputError, match=r"data.json: missing"):
        report.write(folder)


def test_a_date_that_is_no_text_is_damage(folder: Path) -> None:
    with pytest.raises(InputError, match=r"damaged \(finished: "):
        change(folder, finished=["2026"])
