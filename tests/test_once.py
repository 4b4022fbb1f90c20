from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.once import made_once


def test_of_several_workers_one_makes_and_all_get_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    begun: list[Path] = []

    def make(folder: Path) -> dict[str, Path]:
        begun.append(folder)
        (folder / "file").write_text("made")
        return {"folder": folder}

    with ThreadPoolExecutor(4) as workers:
        found = list(workers.map(lambda _: made_once(tmp_path_factory, "once of four", make), range(4)))
    assert len(begun) == 1
    assert found == [{"folder": begun[0]}] * 4
    assert (begun[0] / "file").read_text() == "made"


def test_a_worker_that_fails_leaves_nothing_to_the_next(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        made_once(tmp_path_factory, "once that fails", fail)
    assert made_once(tmp_path_factory, "once that fails", lambda folder: list(folder.iterdir())) == []
