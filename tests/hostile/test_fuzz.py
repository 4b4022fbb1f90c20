"""Random recipes, configs, tables and run folders, made from good ones: whatever is wrong with them ends as an `InputError`.

    COMPRESS_FUZZ_SECONDS=600 python -m pytest -m slow tests/hostile/test_fuzz.py

Each test takes an equal share of the time. A failure prints its seed and number; the same seed gives the same input.
"""

import gzip
import io
import json
import os
import random
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from compress.commands.verify import rebuild, verify
from compress.reading.load import load_data
from compress.recipe import check, dump, read
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.data.config import DataConfig
from foundation.measure.engine_process import EngineError
from foundation.models.config import ModelConfig, label_names
from foundation.models.folder import Checkpoint
from foundation.models.importing import check_model, import_model
from tests.hostile.finished_runs import write_run
from tests.hostile.lines import one_line
from tests.tiny_recipes import tiny_vit
from triton_repo.deployment import repository_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
TESTS = 5
SECONDS = float(os.environ.get("COMPRESS_FUZZ_SECONDS", "600")) / TESTS
SEED = int(os.environ.get("COMPRESS_FUZZ_SEED", "0"))
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 31, 10**6, 2**31, 2**63, 10**30, -(10**30), 0.0, -0.0, 0.5, -1.5, 1e300, 1e-320),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "x",
        "0",
        "-1",
        "1e5",
        "nan",
        "auto",
        "baseline",
        "input",
        "finetune",
        "a/b",
        "~",
        "~nosuchuser",
    ),
    *("/dev/null", "/dev/zero", "..", ".", "./absent", "x" * 5000, "9" * 5000, "a\x00b", "a\nb", "\ud800", "é", "🙂", "true", "null"),
    *([], {}, [[]], [None], [1, "x"], {"a": 1}, {"": None}, {"name": "x"}, {"id": 7}, [{}], [[[[[]]]]]),
]


WORDS = [b"NaN", b"-Infinity", b"1e999", b"\\ud800", b"nan", b"9" * 5000, b"[" * 2000, b"\xef\xbb\xbf"]


def changed(value: Any, random_: random.Random, depth: int = 0) -> Any:
    """Returns plain data with one random change: a value replaced, a key or entry removed, repeated, renamed or moved."""
    if isinstance(value, dict) and value and (depth == 0 or random_.random() < 0.85):
        key = random_.choice(list(value))
        result, kind = dict(value), random_.random()
        if kind < 0.7:
            result[key] = changed(value[key], random_, depth + 1)
        elif kind < 0.8:
            del result[key]
        elif kind < 0.9:
            result[str(key) + random_.choice(["", "s", "_", "x"])] = result.pop(key)
        else:
            result[random_.choice(list(value))] = value[key]
        return result
    if isinstance(value, list) and value and random_.random() < 0.85:
        index, kind = random_.randrange(len(value)), random_.random()
        if kind < 0.7:
            return [*value[:index], changed(value[index], random_, depth + 1), *value[index + 1 :]]
        return value[:index] + value[index + 1 :] if kind < 0.8 else [*value, value[index]]
    if isinstance(value, int | float) and not isinstance(value, bool) and random_.random() < 0.4:
        return random_.choice([-value, value * 2, value + 1, value - 1, value * 10**9, value / 3, str(value), [value]])
    return random_.choice(ODD)


def bitten(data: bytes, random_: random.Random) -> bytes:
    """Returns bytes with a few random changes."""
    result = bytearray(data)
    for _ in range(random_.choice([1, 1, 2, 5, 20])):
        place, kind = random_.randrange(max(1, len(result))), random_.random()
        if not result or kind < 0.1:
            result[place:place] = random_.randbytes(random_.randrange(1, 9))
        elif kind < 0.6:
            result[place] = random_.choice([0, 9, 10, 13, 34, 44, 48, 57, 91, 92, 123, 127, 128, 192, 255, random_.randrange(256)])
        elif kind < 0.7:
            del result[place : place + random_.randrange(1, 50)]
        elif kind < 0.8:
            result[place:place] = result[place : place + random_.randrange(1, 200)]
        elif kind < 0.9:
            result = result[:place]
        else:
            result[place:place] = random_.choice(WORDS)
    return bytes(result)


def hammer(trial: Callable[[random.Random], None]) -> None:
    """Runs a trial with ever new random numbers until the time is over; only an `InputError` may leave it."""
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        try:
            trial(random.Random(f"{SEED} {number}"))
        except InputError as error:
            one_line(error, most=60)
        except Exception as error:
            error.add_note(f"COMPRESS_FUZZ_SEED={SEED}, number {number}")
            raise
        number += 1
    assert number > 10, "too few trials to tell anything"
    print(f"{number} trials")


def test_recipes(tmp_path: Path) -> None:
    good = [
        tiny_vit("tiny") | {"stages": [{"finetune": {"epochs": 1}}, {"quantize": {"mode": "ptq"}}, "export"]},
        dump(check(tiny_vit("tiny") | {"stages": [{"finetune": {}}, {"distill": {}}, {"prune": {}}, {"quantize": {}}, {"export": {}}]})),
    ]
    recipes = Path(__file__).resolve().parents[2] / "recipes"
    good += [yaml.safe_load(path.read_text()) for path in sorted(recipes.rglob("*.yaml")) if "extends" not in path.read_text()]
    keys = [
        "seed",
        "name",
        "data.path",
        "data.columns.text",
        "model.config",
        "stages.export.variants",
        "stages.quantize.mode",
        "stages",
        "target",
    ]

    def trial(draw: random.Random) -> None:
        value: Any = draw.choice(good)
        for _ in range(draw.choice([1, 1, 2, 4])):
            value = changed(value, draw)
        kind = draw.random()
        if kind < 0.4 and isinstance(value, dict):
            settings = [f"{draw.choice(keys)}{draw.choice(['', '.x', '.id'])}={draw.choice(ODD)!s}" for _ in range(draw.choice([0, 1, 2]))]
            check(value, settings)
            return
        try:
            text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, UnicodeError, RecursionError):
            return
        (tmp_path / "recipe.yaml").write_bytes(text if kind < 0.7 else bitten(text, draw))
        read(tmp_path / "recipe.yaml")

    hammer(trial)


def test_model_folders(tiny_bert: Path, tiny_vit: Path, tmp_path: Path) -> None:
    sources = [(tiny_bert, "text-classification", ("negative", "positive")), (tiny_vit, "image-classification", ("a", "b", "c"))]

    def trial(draw: random.Random) -> None:
        source, task, labels = draw.choice(sources)
        folder, out = tmp_path / "model", tmp_path / "out"
        for old in (folder, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(source, folder)
        out.mkdir()
        file = draw.choice(sorted(folder.iterdir()))
        if file.suffix == ".json" and draw.random() < 0.8:
            value = json.loads(file.read_text())
            for _ in range(draw.choice([1, 1, 2, 4])):
                value = changed(value, draw)
            file.write_text(json.dumps(value))
        else:
            file.write_bytes(bitten(file.read_bytes(), draw))
        config = ModelConfig(path=str(folder), task=task, head=draw.choice(["keep", "keep", "new"]))
        label_names(config)
        check_model(config, len(labels), 16)
        import_model(config, labels, 0, out)
        prepared = Checkpoint(out).preprocessor(task, 16, Target())
        prepared.encode(["a fine film"] if task.startswith("text") else [_png()])

    hammer(trial)


def test_random_models(tiny_bert: Path, bert_config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    kinds = {"bert": bert_config} | {
        kind: {key: value for key, value in AutoConfig.for_model(kind).to_dict().items() if isinstance(value, int | float | str | list)}
        for kind in ("distilbert", "roberta", "gpt2", "convnext", "vit", "qwen3")
    }

    def trial(draw: random.Random) -> None:
        kind = draw.choice(list(kinds))
        small = {"num_hidden_layers": 2, "n_layers": 2, "n_layer": 2}
        base = {key: value for key, value in kinds[kind].items() if key not in ("transformers_version", "architectures", "_name_or_path")}
        value: Any = {"model_type": kind} | base | {key: value for key, value in small.items() if key in base}
        if kind != "bert":
            value = {key: inner for key, inner in value.items() if key == "model_type" or key in small or draw.random() < 0.1}
        for _ in range(draw.choice([1, 1, 2])):
            value = changed(value, draw)
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            task = draw.choice(["text-classification", "image-classification"])
            check_model(ModelConfig(config=value, init="random", task=task), 2, 16, str(tiny_bert))

    hammer(trial)


def _png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "PNG")
    return file.getvalue()


def tables(folder: Path) -> list[Path]:
    """Writes good tables, one in each format."""
    rows = [{"text": f"row {row}", "label": row % 3, "x": None} for row in range(40)]
    csv = "text,label\n" + "".join(f'"row ""{row}""\n",{row % 3}\n' for row in range(40))
    (folder / "rows.csv").write_text(csv)
    (folder / "rows.csv.gz").write_bytes(gzip.compress(csv.encode()))
    (folder / "rows.tsv").write_text("text\tlabel\n" + "".join(f"row {row}\t{row % 3}\n" for row in range(40)))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for row in range(12):
            member = tarfile.TarInfo(f"{'train' if row < 9 else 'test'}/{row % 3}/{row}.png")
            member.size = len(_png())
            archive.addfile(member, io.BytesIO(_png()))
    return sorted(folder.iterdir())


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    good = tables(tmp_path / "good")

    def trial(draw: random.Random) -> None:
        file = draw.choice(good)
        path = tmp_path / "bad" / file.name
        if file.suffix == ".jsonl" and draw.random() < 0.6:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = changed(rows, draw)
            path.write_text("".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows])))
        elif file.suffix == ".parquet" and draw.random() < 0.5:
            values = [draw.choice(ODD) for _ in range(6)]
            try:
                labels = pyarrow.array([*(values[: draw.choice([1, 2])] * 3)[:3], "x", "x", "x"])
                table = pyarrow.table({"text": [f"row {row}" for row in range(6)], "label": labels})
            except (pyarrow.ArrowException, OverflowError, UnicodeError, TypeError):
                return
            pyarrow.parquet.write_table(table, path)
        else:
            path.write_bytes(bitten(file.read_bytes(), draw))
        task = "image-classification" if file.suffix == ".tar" else draw.choice(["text-classification", "text-regression"])
        names = draw.choice([None, None, ("a", "b", "c"), ("1", "2", "3")]) if task != "text-regression" else None
        load_data(DataConfig(path=str(path), max_expanded_gb=0.01), task, names, lambda line: None)

    hammer(trial)


def test_run_folders(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")

    def trial(draw: random.Random) -> None:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        file = draw.choice([path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"])
        text = file.suffix in (".json", ".yaml")
        if text and draw.random() < 0.7:
            value = yaml.safe_load(file.read_text()) if file.suffix == ".yaml" else json.loads(file.read_text())
            value = changed(value, draw)
            try:
                content = yaml.safe_dump(value) if file.suffix == ".yaml" else json.dumps(value)
                file.write_text(content)
            except (yaml.YAMLError, UnicodeError):
                return
        else:
            file.write_bytes(bitten(file.read_bytes(), draw))
        for command in (rebuild, repository_of, lambda where: verify(where, log=lambda line: None)):
            try:
                command(folder)
            except (InputError, EngineError) as error:
                if isinstance(error, InputError):
                    one_line(error, most=60)

    hammer(trial)


def test_the_changes_reach_every_depth() -> None:
    found = {json.dumps(changed({"a": [1, {"b": 2}], "c": "x"}, random.Random(number)), default=str) for number in range(300)}
    assert len(found) > 50
    assert len({bitten(b"0123456789" * 10, random.Random(number)) for number in range(300)}) > 250
