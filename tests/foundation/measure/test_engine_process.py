from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.measure.engine_process import EngineError, EngineProcess, read_rows, write_rows
from tests.foundation.scripted_engine import Scripted

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(rows=st.one_of(st.lists(TEXT), st.lists(st.tuples(TEXT, TEXT)), st.lists(st.binary())))
def test_rows_come_back(rows: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    write_rows(file, rows)
    assert read_rows(file) == rows


def test_an_error_is_one_line_that_names_the_engine(tmp_path: Path) -> None:
    with EngineProcess(Scripted("openvino", tmp_path / "log")) as engine:
        assert engine.versions == {"scripted": "1"}
        with pytest.raises(EngineError, match=r"^openvino static int8: RuntimeError: no such kernel$"):
            engine.ask("fail")
        assert engine.ask("anything")  # it goes on


def test_a_crash_is_told_with_its_last_words(tmp_path: Path) -> None:
    with EngineProcess(Scripted("openvino", tmp_path / "log")) as engine:
        for _ in range(2):  # the second time the pipe is closed already
            with pytest.raises(EngineError, match=r"its process exited with status 9 during 'crash': Segmentation fault of the library$"):
                engine.ask("crash")


def test_an_engine_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"unopenable static int8: .* status 9 during 'open'"):
        EngineProcess(Scripted("unopenable", tmp_path / "log"))


def test_an_engine_that_is_not_waited_for_fails_where_it_is(tmp_path: Path) -> None:
    engine = EngineProcess(Scripted("unopenable", tmp_path / "log"), wait=False)
    with engine, pytest.raises(EngineError, match=r"unopenable static int8: .* status 9 during 'open'"):
        engine.await_open()
    assert engine._process.returncode == 9


def test_its_files_and_its_process_are_gone_afterwards(tmp_path: Path) -> None:
    with EngineProcess(Scripted("openvino", tmp_path / "log")) as engine:
        folder = Path(engine._files.name)
        assert folder.exists()
    assert not folder.exists()
    assert engine._process.returncode == 0
    engine.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("elsewhere", "device cpu was asked for, but the engine reports cuda (played); give cuda"),
        ("halved", "float_precision fp32 was asked for, but the engine reports bf16 (played); give bf16"),
    ],
)
def test_an_engine_that_runs_elsewhere_is_refused(name: str, said: str, tmp_path: Path) -> None:
    with EngineProcess(Scripted(name, tmp_path / "log")) as engine, pytest.raises(EngineError) as caught:
        engine.ask("measure", batch=1, sequence=8, least=1, most=1, seconds=0)
    assert str(caught.value) == f"{name} static int8: {said}"
