"""What `load_data` makes of files: the right splits, the right labels, and nothing that is trained on and chosen or judged on."""

import io
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, content_key, divide, hold_out
from foundation.labels.classes import ClassIds
from tests.problems import raises_problem

Rows = list[tuple[Any, ...]]


def write_tsv(path: Path, rows: Rows, header: str = "text\tlabel") -> None:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [(header,), *rows] if row != ("",)), encoding="utf-8")


def numbered(name: str, count: int, classes: int = 2) -> Rows:
    return [(f"{name} {i}", i % classes) for i in range(count)]


def load(
    path: Path | str, task: Any = "text-classification", names: tuple[str, ...] | None = None, **config: Any
) -> tuple[Data, list[str]]:
    log: list[str] = []
    return load_data(DataConfig.model_validate({"path": str(path), **config}), task, names, log.append), log


def check_apart(data: Data) -> None:
    train, selection, evaluation = (set(split.keys) for split in (data.train, data.selection, data.evaluation))
    assert not train & selection
    assert not selection & evaluation
    assert data.selection.rows
    assert data.train.rows


def test_test_is_evaluation_and_validation_selection(tmp_path: Path) -> None:
    for name, count in (("train", 50), ("dev", 20), ("test", 30)):
        write_tsv(tmp_path / f"{name}.tsv", numbered(name, count))
    data, _ = load(tmp_path)
    assert data.train.rows == [f"train {i}" for i in range(50)]
    assert data.selection.rows == [f"dev {i}" for i in range(20)]
    assert data.evaluation.rows == [f"test {i}" for i in range(30)]
    assert data.labels == ("0", "1")
    assert data.train.labels.array.dtype == np.int64
    assert data.train.labels.array.tolist() == [i % 2 for i in range(50)]
    check_apart(data)


def test_an_unlabelled_test_leaves_validation_for_the_final_figures(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", numbered("train", 1000))
    write_tsv(tmp_path / "validation.tsv", numbered("validation", 20))
    write_tsv(tmp_path / "test.tsv", [("a", -1), ("b", -1)])
    data, log = load(tmp_path)
    assert data.evaluation.rows == [f"validation {i}" for i in range(20)]
    assert (len(data.train), len(data.selection)) == (800, 200)
    assert any("labels of test are -1" in line for line in log)
    check_apart(data)


@pytest.mark.parametrize(("rows", "expected"), [(10, 2), (300, 60), (2000, 200), (10_000, 500), (50_000, 2000)])
def test_size_of_a_selection_taken_from_train(tmp_path: Path, rows: int, expected: int) -> None:
    write_tsv(tmp_path / "train.tsv", numbered("train", rows))
    write_tsv(tmp_path / "test.tsv", numbered("test", 4))
    data, _ = load(tmp_path)
    assert (len(data.selection), len(data.train)) == (expected, rows - expected)
    check_apart(data)


def test_selection_depends_on_content_only(tmp_path: Path) -> None:
    rows = numbered("train", 2000)
    chosen = []
    for order in (rows, rows[::-1], rows[1000:] + rows[:1000]):
        write_tsv(tmp_path / "train.tsv", order)
        write_tsv(tmp_path / "test.tsv", numbered("test", 4))
        data, _ = load(tmp_path)
        chosen.append(sorted(str(row) for row in data.selection.rows))
        again, _ = load(tmp_path)
        assert data.digest == again.digest
    assert chosen[0] == chosen[1] == chosen[2]


@given(
    st.lists(st.integers(0, 40), min_size=12, max_size=120),
    st.lists(st.integers(0, 60), max_size=20),
    st.lists(st.integers(20, 60), min_size=1, max_size=20),
)
def test_no_content_is_on_two_sides(train: list[int], validation: list[int], test: list[int]) -> None:
    splits = [Split([f"row {i}" for i in part], ClassIds(np.array([i % 2 for i in part]))) for part in (train, validation, test)]
    rest, judged = set(train) - set(test), set(validation) - set(test)
    left = len(rest - judged) if judged else len(rest) - 1
    if left <= 0:
        with pytest.raises(InputError):
            divide(splits[0], splits[2], splits[1] if validation else None, ("0", "1"), "data", lambda line: None)
        return
    data = divide(splits[0], splits[2], splits[1] if validation else None, ("0", "1"), "data", lambda line: None)
    check_apart(data)
    assert data.evaluation.rows == splits[2].rows
    assert set(data.train.rows) <= set(splits[0].rows)
    assert not set(data.calibration(64).rows) & set(data.selection.rows)


def test_calibration_rows_are_train_rows_and_follow_the_seed(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", numbered("train", 1500) + numbered("train", 100))
    write_tsv(tmp_path / "test.tsv", numbered("test", 4))
    data, _ = load(tmp_path)
    first, again, other = data.calibration(), data.calibration(), data.calibration(seed=1)
    assert len(first) == 512
    assert first.rows == again.rows
    assert first.rows != other.rows
    assert len(set(first.keys)) == 512
    by_row = dict(zip(data.train.rows, data.train.labels.array.tolist(), strict=True))
    assert [by_row[row] for row in first.rows] == first.labels.array.tolist()
    assert len(data.calibration(10**6)) == len(set(data.train.keys))


def test_digest_covers_rows_order_labels_and_names() -> None:
    def digest(rows: list[Any], labels: list[int], names: tuple[str, ...] = ("a", "b")) -> str:
        split = Split(rows, ClassIds(np.array(labels)))
        return Data(split, split, split, names).digest

    base = digest(["x", "y"], [0, 1])
    assert digest(["x", "y"], [0, 1]) == base
    assert (
        len(
            {
                base,
                digest(["y", "x"], [0, 1]),
                digest(["x", "y"], [1, 0]),
                digest(["x", "z"], [0, 1]),
                digest(["x", "y"], [0, 1], ("b", "a")),
            }
        )
        == 5
    )


def test_content_keys_tell_kinds_and_borders_apart() -> None:
    rows: list[Any] = ["ab", b"ab", ("a", "b"), ("ab", ""), ("", "ab"), ("2:ab", ""), "1:1ab"]
    assert len({content_key(row) for row in rows}) == len(rows)


def test_pairs_and_regression(tmp_path: Path) -> None:
    rows = [(f"a {i}", f"b {i}", i / 4) for i in range(40)]
    for name in ("train", "test"):
        write_tsv(tmp_path / f"{name}.tsv", rows if name == "train" else [("c", "d", "5.000")], "one\ttwo\tscore")
    data, _ = load(tmp_path, "text-regression", columns={"text": "one", "text_pair": "two", "label": "score"})
    assert data.evaluation.rows == [("c", "d")]
    assert data.evaluation.labels.array.dtype == np.float32
    assert data.evaluation.labels.array.tolist() == [5.0]
    assert data.labels == ("score",)


def test_lists_of_files_with_columns_of_their_own(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", numbered("train", 30))
    write_tsv(tmp_path / "dev.tsv", numbered("dev", 3))
    (tmp_path / "more.txt").write_text("1\tmore a\n0\tmore b\textra\n")
    more = {"file": "more.txt", "header": False, "columns": {"text": 1, "label": 0}}
    data, _ = load(tmp_path, files={"train": "train.tsv", "test": ["dev.tsv", more]})
    assert data.evaluation.rows == ["dev 0", "dev 1", "dev 2", "more a", "more b"]
    assert data.evaluation.labels.array.tolist() == [0, 1, 0, 1, 0]


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    for shard in (1, 0):
        table = pyarrow.table({"text": [f"{shard} {i}" for i in range(10)], "label": [0, 1] * 5})
        pyarrow.parquet.write_table(table, tmp_path / f"train-0000{shard}-of-00002.parquet")
    write_tsv(tmp_path / "test.tsv", numbered("test", 4))
    data, _ = load(tmp_path, names=("no", "yes"))
    together = [*data.train.rows, *data.selection.rows]
    assert sorted(str(row) for row in together) == sorted(f"{shard} {i}" for shard in (0, 1) for i in range(10))
    assert data.train.rows == sorted(data.train.rows, key=str)


def test_one_file_is_divided(tmp_path: Path) -> None:
    write_tsv(tmp_path / "all.tsv", numbered("row", 100) + numbered("row", 10))
    data, log = load(tmp_path / "all.tsv")
    assert 20 <= len(data.evaluation) <= 22
    assert not set(data.train.keys) & set(data.evaluation.keys)
    assert any("become the test split" in line for line in log)
    check_apart(data)


def test_hold_out_keeps_equal_rows_together() -> None:
    split = Split(["same"] * 5 + [f"row {i}" for i in range(45)], ClassIds(np.arange(50)))
    rest, held = hold_out(split, 0.2)
    assert len(held) == 10
    assert len(rest) + len(held) == 50
    assert not set(rest.keys) & set(held.keys)


def test_labels_are_mapped_to_the_names_of_the_model(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", [("a", "positive"), ("b", "negative"), ("c", 1), ("d", "0")] * 5)
    write_tsv(tmp_path / "test.tsv", [("e", "negative")])
    data, _ = load(tmp_path, names=("negative", "positive"))
    assert data.labels == ("negative", "positive")
    assert dict(zip(data.train.rows, data.train.labels.array.tolist(), strict=True)).items() <= {"a": 1, "b": 0, "c": 1, "d": 0}.items()
    write_tsv(tmp_path / "test.tsv", [("e", "negativ"), ("f", 2)])
    with pytest.raises(InputError) as caught:
        load(tmp_path, names=("negative", "positive"))
    assert "line 2: label 'negativ'; allowed by the model: negative, positive; did you mean 'negative'?" in caught.value.lines[0]
    assert "line 3: label '2'" in caught.value.lines[1]


def test_names_of_the_data_are_sorted_as_numbers_where_they_are(tmp_path: Path) -> None:
    write_tsv(tmp_path / "test.tsv", numbered("test", 2))
    write_tsv(tmp_path / "train.tsv", [(f"t {i}", label) for i, label in enumerate(["10", "9", "1", "0"] * 5)])
    assert load(tmp_path)[0].labels == ("0", "1", "9", "10")
    write_tsv(tmp_path / "train.tsv", [(f"t {i}", label) for i, label in enumerate(["10", "9", "b", "0", "1"] * 5)])
    assert load(tmp_path)[0].labels == ("0", "1", "10", "9", "b")


def test_whole_floats_and_integers_are_the_same_label(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "{i}", "label": {i % 2}.0}}\n' for i in range(20)))
    (tmp_path / "test.jsonl").write_text('{"text": "x", "label": "1"}\n{"text": "y", "label": 0}\n')
    assert load(tmp_path)[0].evaluation.labels.array.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "{}/none.tsv"}, "no such file or folder; .*did you mean 'nope.tsv'"),
        ({"path": "{}/nowhere/at/all"}, "no such file or folder"),
        ({"files": {"train": "trian.tsv", "test": "test.tsv"}}, "data.files.train: .*trian.tsv: no such file; did you mean 'train.tsv'"),
        ({"files": {"train": "train.xlsx", "test": "test.tsv"}}, "train.xlsx: file type '.xlsx'; allowed: .tsv .txt .csv"),
        ({"path": "{}/train.tsv", "files": {"train": "train.tsv"}}, "a file, and data.files is given too"),
        ({"path": "owner/name", "files": {"train": "train.tsv"}}, "owner/name: no such file or folder"),
        ({"files": {"train": "train.tsv"}}, "no labelled test or validation split"),
        ({"path": "sklearn:digits"}, "images, and model.task is text-classification"),
        ({"files": {"train": "train.tar.gz"}}, "images or sounds, and model.task is text-classification"),
    ],
)
def test_places_that_lead_nowhere(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for name in ("train.tsv", "test.tsv", "nope.tsv", "train.xlsx", "train.tar.gz"):
        write_tsv(tmp_path / name, numbered(name, 20))
    (tmp_path / "train.tar.gz").touch()
    config: dict[str, Any] = {"path": "{}", **change}
    with pytest.raises(InputError, match=message) as caught:
        load(config.pop("path").format(tmp_path), **config)
    assert all("\n" not in problem for problem in caught.value.lines)


def test_two_candidates_for_a_split_are_not_guessed_at(tmp_path: Path) -> None:
    for name in ("train.tsv", "train.csv", "dev.tsv", "validation.tsv"):
        write_tsv(tmp_path / name, numbered(name, 20))
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert "train.csv, train.tsv all look like the train split" in "\n".join(caught.value.lines)
    assert "dev.tsv, validation.tsv all look like the validation split" in "\n".join(caught.value.lines)


def test_subset_is_ignored_with_a_line_for_local_data(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_tsv(tmp_path / f"{name}.tsv", numbered(name, 20))
    _, log = load(tmp_path, subset="sst2")
    assert "subset 'sst2' is ignored" in log[0]


@pytest.mark.parametrize(
    "config",
    [
        {"path": ""},
        {"path": "x", "max_length": 4},
        {"path": "x", "columns": {"text": -1}},
        {"path": "x", "columns": {"text": True}},
        {"path": "x", "columns": {"txt": "text"}},
        {"path": "x", "files": {"test": "x.tsv"}},
        {"path": "x", "files": {"train": []}},
        {"path": "x", "files": {"train": {"header": False}}},
        {"path": "x", "files": {"train": "a", "dev": "b"}},
        {"path": "x", "files": {"train": {"file": "a", "repeat": 0}}},
        {"path": "x", "files": {"train": "a", "test": {"file": "b", "repeat": 2}}},
        {"path": "x", "files": {"train": "a", "validation": {"file": "b", "repeat": 2}}},
        {"path": "x", "certify": {"files": {"file": "b", "repeat": 2}}},
    ],
)
def test_configs_that_cannot_be_right(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DataConfig.model_validate(config)


def test_config_goes_through_json_and_back() -> None:
    config = DataConfig.model_validate({"path": "x", "files": {"train": "a.tsv", "test": ["b", {"file": "c", "columns": {"text": 0}}]}})
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


def test_image_folders_archives_and_tables_hold_the_same(tmp_path: Path) -> None:
    folder, archives = tmp_path / "folder", tmp_path / "archives"
    archives.mkdir()
    lines = {"train": "", "test": ""}
    with tarfile.open(tmp_path / "both.tgz", "w:gz") as both:
        for split, seeds in (("test", range(100, 104)), ("train", range(20))):
            for seed in sorted(seeds, key=lambda seed: (seed % 2, f"{seed:03}")):
                path = folder / split / ("cat", "dog")[seed % 2] / f"{seed:03}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(jpeg(seed))
                both.add(path, path.relative_to(folder))
                lines[split] += f"{path.relative_to(folder)},{path.parent.name}\n"
            with tarfile.open(archives / f"{split}.tar", "w") as archive:
                archive.add(folder / split, split)
    (folder / "train" / "cat" / ".DS_Store").write_text("not looked at")
    (folder / "hub").mkdir()
    for split, text in lines.items():
        (folder / f"list_{split}.csv").write_text("image,label\n" + text)
    ways: list[tuple[Path, dict[str, Any]]] = [
        (folder, {}),
        (tmp_path / "both.tgz", {}),
        (archives, {"files": {"train": "train.tar", "test": "test.tar"}}),
        (tmp_path, {"files": {"train": "both.tgz", "test": "both.tgz"}}),
        (folder, {"files": {"train": "train", "test": "test"}}),
        (folder, {"files": {"train": "list_train.csv", "test": "list_test.csv"}}),
    ]
    loaded = [load(path, "image-classification", **config)[0] for path, config in ways]
    assert {len({data.digest for data in loaded}), loaded[0].labels} == {1, ("cat", "dog")}
    assert sorted(loaded[0].evaluation.rows, key=repr) == sorted((jpeg(seed) for seed in range(100, 104)), key=repr)
    assert loaded[0].evaluation.labels.array.tolist() == [0, 0, 1, 1]


def test_digits_are_built_in() -> None:
    data, _ = load("sklearn:digits", "image-classification")
    assert len(data.train) + len(data.selection) == 1437
    assert len(data.evaluation) == 360
    assert data.labels == tuple("0123456789")
    counts = np.bincount(data.evaluation.labels.array)
    assert counts.min() >= 34
    assert counts.max() <= 38
    pixels = np.asarray(Image.open(io.BytesIO(data.train.rows[0])))  # type: ignore[arg-type]
    assert pixels.shape == (8, 8)
    assert pixels.max() <= 255
    assert set(np.unique(pixels)) <= {round(i * 255 / 16) for i in range(17)}


def hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Any] | Exception) -> SimpleNamespace:
    asked = SimpleNamespace(arguments=None)

    def load_dataset(*arguments: Any) -> dict[str, Any]:
        asked.arguments = arguments
        if isinstance(splits, Exception):
            raise splits
        return splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def hub_split(texts: list[str], labels: list[int], names: list[str]) -> datasets.Dataset:
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=names), "idx": datasets.Value("int32")}
    )
    return datasets.Dataset.from_dict({"sentence": texts, "label": labels, "idx": list(range(len(texts)))}, features=features)


def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    train = hub_split([f"row {i}" for i in range(20)], [0, 1] * 10, ["negative", "positive"])
    splits = {
        "train": train,
        "validation": hub_split(["x", "y"], [1, 0], ["negative", "positive"]),
        "test": hub_split(["z"], [-1], ["negative", "positive"]),
        "extra": train,
    }
    asked = hub(monkeypatch, splits)
    columns = {"text": "sentence"}
    data, log = load("nyu-mll/glue", subset="sst2", columns=columns)
    assert asked.arguments == ("nyu-mll/glue", "sst2")
    assert data.labels == ("negative", "positive")
    assert data.evaluation.rows == ["x", "y"]
    assert data.evaluation.labels.array.tolist() == [1, 0]
    assert any("'extra'" in line for line in log)
    # A model that names the same classes in another order goes by the names; one without names goes by the numbers.
    assert load("nyu-mll/glue", columns=columns, names=("POSITIVE", "NEGATIVE"))[0].evaluation.labels.array.tolist() == [0, 1]
    assert load("nyu-mll/glue", columns=columns, names=("LABEL_0", "LABEL_1"))[0].evaluation.labels.array.tolist() == [1, 0]
    with pytest.raises(InputError, match=r"train: .* 'text'; available: 'sentence', 'label', 'idx'"):
        load("nyu-mll/glue")


def test_hub_images_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(seeds: range) -> datasets.Dataset:
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
        images = [{"bytes": jpeg(seed), "path": None} for seed in seeds]
        return datasets.Dataset.from_dict({"image": images, "label": [seed % 2 for seed in seeds]}, features=features)

    hub(monkeypatch, {"train": split(range(20)), "test": split(range(20, 24))})
    data, _ = load("owner/pets", "image-classification")
    assert data.evaluation.rows == [jpeg(seed) for seed in range(20, 24)]
    assert data.labels == ("cat", "dog")


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("Couldn't reach 'owner/name'\non the Hub"))
    with raises_problem("data.path owner/name (subset x)", "Couldn't reach", "local file or folder"):
        load("owner/name", subset="x")


def test_a_misspelt_folder_that_looks_like_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "data" / "mrpc").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hub(monkeypatch, ConnectionError("Couldn't reach 'data/mrcp' on the Hub"))
    with raises_problem("data.path data/mrcp", str(tmp_path), "did you mean 'data/mrpc'"):
        load("data/mrcp")


def files_without_header(*names: str) -> list[dict[str, Any]]:
    return [{"file": name, "header": False, "columns": {"text": 0, "label": 1}} for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "task", "config", "sizes"),
    [
        ("sst2", "text-classification", {"columns": {"text": "sentence"}}, (65349, 2000, 872)),
        (
            "sst2",
            "text-classification",
            {
                "columns": {"text": "sentence"},
                "files": {"train": "train.tsv.gz", "test": ["dev.tsv", *files_without_header("sentence_level_test.tsv")]},
            },
            (65343, 2000, 2693),
        ),
        (
            "mrpc",
            "text-classification",
            {
                "columns": {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"},
                "files": {"train": "train.tsv.gz", "validation": "dev.tsv", "test": "msr_paraphrase_test.txt.gz"},
            },
            (3667, 408, 1725),
        ),
        (
            "stsb",
            "text-regression",
            {
                "columns": {"text": "sentence1", "text_pair": "sentence2", "label": "score"},
                "files": {
                    "train": "train.tsv.gz",
                    "validation": "dev.tsv",
                    "test": {"file": "sts-test.tsv", "header": False, "columns": {"text": 5, "text_pair": 6, "label": 4}},
                },
            },
            (5734, 1498, 1379),
        ),
        ("cifar10", "image-classification", {"files": {"train": "subset_train.tar.gz", "test": "subset_test.tar.gz"}}, (4750, 250, 1000)),
    ],
)
def test_real_data(folder: str, task: Any, config: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    data, _ = load(Path(os.environ["COMPRESS_TEST_DATA"]) / "data" / folder, task, **config)
    assert (len(data.train), len(data.selection), len(data.evaluation)) == sizes
    check_apart(data)
    assert len(data.calibration()) == 512
