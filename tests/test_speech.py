"""Whole runs of the task speech-recognition, on tiny models of waveforms: every stage, the served answers, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.api import serve
from compress.commands.init import write_template
from compress.commands.verify import verify
from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import check, read
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.config import Columns, DataConfig
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.heads.transcriber import vocabulary_of
from foundation.standalone.response import transcript
from tests import tiny_speech, without_clocks
from tests.docs.clients import ask
from tests.report_keys import undocumented

pytestmark = pytest.mark.usefixtures("engines_inside")

TASK = "speech-recognition"
LABELS = ("<pad>", "<unk>", "|", "a", "b", "c")
FINETUNE = {"finetune": {"epochs": 10, "learning_rate": 4e-3, "batch_size": 16}}


def recipe(folder: Path, stages: list[Any], kind: str = "wav2vec2", masked: bool = True, **changes: Any) -> Any:
    data = folder / "data"
    given = {"path": str(data if data.exists() else tiny_speech.folder(data)), "max_seconds": 0.25}
    target = {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 2], "threads": 1, "sequence_lengths": [1000, 2000]}
    model = tiny_speech.model(kind, 2, masked)
    return check({"name": "tiny", "model": model, "data": given, "target": target, "stages": stages, "seed": 1, **changes})


def silent() -> ConsoleProgress:
    return ConsoleProgress("silent")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "masked"), [("wav2vec2", True), ("hubert", True), ("wav2vec2", False)])
def test_a_run_through_all_stages(kind: str, masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    stages = [
        FINETUNE,
        {"distill": {"student": {"layers": 1}, "loss": "soft_target", "epochs": 2, "batch_size": 16, "learning_rate": 1e-3}},
        {"prune": {"sparsity": 0.3, "rows": 32, "multiple_of": 8, "recover": {"epochs": 1, "distill": True, "batch_size": 16}}},
        {"quantize": {"mode": "qat", "calibration": {"rows": 32}, "qat": {"epochs": 1, "batch_size": 16}}},
        {"export": {}},
    ]
    target = {"engines": ["onnxruntime"], "batch_sizes": [1], "threads": 1}
    report = run(recipe(tmp_path, stages, kind, masked, target=target), tmp_path / "run", progress=silent()).report
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "distill", "prune", "quantize"]
    assert report["metric"] == {"name": "wer", "higher_is_better": False, "chance": report["metric"]["chance"]}
    assert [variant["accuracy"]["torch"]["n"] for variant in report["variants"]] == [40] * 4
    if masked:  # without a mask padding is learned too, which takes longer
        assert report["variants"][0]["accuracy"]["torch"]["value"] <= 0.6
    assert undocumented(report) == []
    exported = json.loads(next((tmp_path / "run").glob("stages/export-*/export.json")).read_text())
    assert all(engine["runnable"] for build in exported["builds"] for engine in build["engines"]), exported
    lines = [json.loads(line) for line in (tmp_path / "run" / "flips.jsonl").read_text().splitlines()]
    assert all(line["input"].startswith("sound of ") and set(line["label"]) <= set("abc ") for line in lines)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Lower is better." in page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("masked", [True, False])
def test_a_served_model_answers_as_its_engine(masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    stages = [FINETUNE, {"quantize": {"calibration": {"rows": 64}}}, {"export": {}}, {"triton_repo": {}}]
    target = {"engines": ["openvino"], "batch_sizes": [1, 2], "threads": 1, "sequence_lengths": [1000, 2000]}
    run(recipe(tmp_path, stages, masked=masked, target=target), tmp_path / "run", progress=silent())
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    shutil.copyfile(sorted((tmp_path / "data").rglob("*.wav"))[0], tmp_path / "sound.wav")
    with serve(tmp_path / "run") as server:
        printed = ask("docs/tutorials/speech.md", server, tmp_path)
    assert printed[0].strip() in printed[1]
    assert not masked or set(printed[0].strip()) & set("abc")


@pytest.mark.slow
def test_a_quantized_model_reads_what_the_float_model_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [FINETUNE, {"quantize": {"convolutions": True, "calibration": {"rows": 64}}}, {"export": {}}]
    target = {"engines": ["onnxruntime"], "batch_sizes": [1], "threads": 1}
    report = run(recipe(tmp_path, stages, target=target), tmp_path / "run", progress=silent()).report
    before, after = (variant["accuracy"]["onnxruntime"]["value"] for variant in report["variants"])
    assert before <= 0.6
    assert after <= before + 0.1
    golden = (tmp_path / "run" / "golden.safetensors").read_bytes()
    assert len(golden) > 1000


@pytest.mark.whole
def test_a_checkpoint_is_one_of_transformers_and_padding_changes_nothing(tmp_path: Path) -> None:
    from transformers import AutoModelForCTC, Wav2Vec2CTCTokenizer

    tiny_speech.folder(tmp_path / "data", train=60)
    run(recipe(tmp_path, [{"finetune": {"epochs": 0.3, "learning_rate": 4e-3}}]), tmp_path / "run", progress=silent())
    folder = next((tmp_path / "run").glob("stages/finetune-*"))
    assert vocabulary_of(folder, "model.path") == LABELS
    model, stock, tokenizer = load(folder), AutoModelForCTC.from_pretrained(folder).eval(), Wav2Vec2CTCTokenizer.from_pretrained(folder)
    random = np.random.default_rng(0)
    rows = [tiny_speech.encoded(tiny_speech.sound(text, random)) for text in ("a", "ab c", "abc")]
    prepared = Checkpoint(folder).preprocessor(TASK, 2000, Target(sequence_lengths=()))
    frames = prepared.sounds.frames(rows)
    with torch.inference_mode():
        logits = model(**{name: torch.from_numpy(value) for name, value in prepared.encode(rows).items()}).logits
        for row, own, count in zip(rows, logits, frames, strict=True):
            alone = stock(input_values=torch.from_numpy(prepared.encode([row], 0)["input_values"])).logits[0]
            assert len(alone) == count
            torch.testing.assert_close(own[:count], alone, atol=1e-4, rtol=1e-3)
            assert own[count:].argmax(-1).unique().tolist() in ([0], [])
            assert transcript(own[:count].numpy(), prepared.labels) == tokenizer.decode(alone.argmax(-1))


def rows_of(folder: Path, rows: list[tuple[str, Any]], split: str = "train") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "one.wav").write_bytes(tiny_speech.encoded(tiny_speech.sound("a", np.random.default_rng(0))))
    with (folder / f"{split}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("audio", "text"), *rows])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "train.csv line 3: '' given as the text of a sound; the words that are spoken are needed"),
        ("a|b", "train.csv line 3: the text 'a|b'; at most 100000 characters without control characters and |"),
        ("a\x07", "train.csv line 3: the text 'a\\x07'; at most"),
    ],
)
def test_a_text_that_cannot_be_learned_is_refused_in_one_line(text: str, line: str, tmp_path: Path) -> None:
    rows_of(tmp_path / "data", [("one.wav", "a"), ("one.wav", text)])
    rows_of(tmp_path / "data", [("one.wav", "a")], "test")
    with pytest.raises(InputError) as caught:
        load_data(DataConfig(path=str(tmp_path / "data")), TASK, None, lambda line: None)
    assert len(caught.value.lines) == 1
    assert line in str(caught.value)


def test_a_column_has_another_name_and_white_space_is_one_space(tmp_path: Path) -> None:
    tiny_speech.folder(tmp_path / "data", train=30, column="said")
    config = DataConfig(path=str(tmp_path / "data"), columns=Columns(label="said"))
    assert load_data(config, TASK, None, lambda line: None).labels == LABELS
    rows_of(tmp_path / "other", [("one.wav", " a \t b\n"), ("one.wav", "b")])
    rows_of(tmp_path / "other", [("one.wav", "c")], "test")
    with pytest.raises(InputError, match=r"1 of 1 characters .* of the train split \(c, \.\.\.\)"):
        load_data(DataConfig(path=str(tmp_path / "other")), TASK, None, lambda line: None)


def test_texts_are_brought_to_the_case_of_a_vocabulary_that_has_one(tmp_path: Path) -> None:
    told: list[str] = []
    tiny_speech.folder(tmp_path / "data", train=30)
    config = DataConfig(path=str(tmp_path / "data"))
    data = load_data(config, TASK, ("<pad>", "|", "A", "B", "C"), told.append)
    assert "data: the model writes in capitals alone; the texts are brought to them" in told
    assert set(np.unique(data.train.labels.array[:, 1, 1:])) == {-1, 1, 2, 3, 4}
    load_data(config, TASK, ("<pad>", "|", "<unk>", "a", "b"), told.append)
    assert any("of them are not in the vocabulary (c): not learned, and counted as wrong" in line for line in told)
    with pytest.raises(InputError, match=r"vocabulary of the model .*give texts in its writing"):
        load_data(config, TASK, ("<pad>", "|", "\u03b1", "\u03b2"), told.append)


VOCABULARY = {"[PAD]": 0, " ": 1, "A": 2, "[UNK]": 3}
SETTINGS = {"pad_token": "[PAD]", "unk_token": {"content": "[UNK]"}, "word_delimiter_token": " ", "do_lower_case": True}


def written(folder: Path, vocabulary: Any, settings: Any, size: int = 4) -> Path:
    for name, value in (("vocab", vocabulary), ("tokenizer_config", settings), ("config", {"vocab_size": size})):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_vocabulary_gets_our_names_for_its_tokens(tmp_path: Path) -> None:
    assert vocabulary_of(written(tmp_path, VOCABULARY, SETTINGS), "model.path") == ("<pad>", "|", "a", "<unk>")
    added = SETTINGS | {"added_tokens_decoder": {"4": {"content": "<s>"}, "5": {"content": "</s>"}}}
    assert vocabulary_of(written(tmp_path, VOCABULARY, added, 5), "model.path") == ("<pad>", "|", "a", "<unk>", "<s>")


@pytest.mark.parametrize(
    ("vocabulary", "settings", "line"),
    [
        ({"eng": {"<pad>": 0}}, {}, "'eng': {'<pad>': 0} given as the id of a token; one vocabulary is allowed"),
        (VOCABULARY, {}, "no token <pad>; name it in tokenizer_config.json: pad_token, word_delimiter_token"),
        ({"<pad>": 0, "a": 2}, {}, "2 tokens need the ids 0 to 1, each once"),
        (VOCABULARY | {"<pad>": 4}, SETTINGS, "pad_token '[PAD]' given, and the vocabulary has <pad> too; rename one"),
        (
            VOCABULARY,
            {"tokenizer_class": "Wav2Vec2PhonemeCTCTokenizer"},
            "tokenizer_class 'Wav2Vec2PhonemeCTCTokenizer' given; Wav2Vec2CTC",
        ),
    ],
)
def test_another_vocabulary_is_refused_in_one_line(vocabulary: Any, settings: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        vocabulary_of(written(tmp_path, vocabulary, settings, 8), "model.path")
    assert len(caught.value.lines) == 1
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"distill": {"student": {"layers": 1}, "augment": {}}}, f"augment: given; {TASK} does not support it"),
        ({"distill": {"student": {"layers": 1}, "loss": "relational"}}, "needs one prediction per row"),
        ({"prune": {"granularity": ["vocabulary"], "sparsity": 0}}, f"vocabulary given; {TASK} has no text to tokenize"),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    tiny_speech.folder(tmp_path / "data", train=30)
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, [{"finetune": {"epochs": 0.5}}, stage]), tmp_path / "run", progress=silent())
    assert len(caught.value.lines) == 1


def test_models_of_spectrograms_are_refused(tmp_path: Path) -> None:
    from tests.tiny_sounds import spectrogram_config

    tiny_speech.folder(tmp_path / "data", train=30)
    model = tiny_speech.model() | {"config": spectrogram_config()}
    with pytest.raises(InputError, match="audio-spectrogram-transformer cannot do speech-recognition"):
        run(recipe(tmp_path, [{"finetune": {}}], model=model), tmp_path / "run", progress=silent())


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template(TASK, tmp_path / "recipe.yaml"))
    assert (read_back.model.task, read_back.data.columns.label, read_back.data.max_seconds) == (TASK, "transcription", 10.0)
    assert [stage.NAME for stage in read_back.stages] == ["finetune", "quantize", "export", "triton_repo"]
