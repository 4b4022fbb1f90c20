"""Every shipped recipe is read, starts with its two comment lines, and runs, shrunk to tiny models and generated rows."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.commands.init import write_copy
from compress.commands.recipes import about, find, shipped
from compress.pipeline import run
from compress.recipe import Recipe, read
from compress.recipe_file import read_file
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels.candidates import Candidates
from foundation.labels.next_token import Tokens
from foundation.labels.relevance import Judged
from foundation.labels.spans import Spans
from foundation.labels.tags import Tags
from foundation.labels.vectors import Pairs
from foundation.measure.metrics import METRICS
from tests import entities, questions, tiny_captions, tiny_collection, tiny_embedding, tiny_sounds, tiny_towers, without_clocks
from tests.export import sentiment
from tests.foundation import tiny_gpt
from tests.report_keys import undocumented
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(ROOT.glob("recipes/**/*.yaml"))


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {
        "quickstart",
        "sst2-minilm-ptq",
        "sst2-minilm-ptq-2693",
        "mrpc-minilm",
        "stsb-minilm",
        "cifar10-vit",
        "tinyshakespeare-gpt",
        "wikitext2-gpt",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_reads_and_says_what_it_is_and_how_to_run_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith(f"# compress run {path.relative_to(ROOT)}")
    assert lines[2] == "# yaml-language-server: $schema=../docs/recipe.schema.json"
    recipe = read(path)
    assert recipe.name == path.stem


def one_step(stage: Any) -> list[str]:
    """Returns the settings by which a stage of a recipe takes one step of an optimizer, and few rows."""
    few = {
        "finetune": ["epochs=0.01"],
        "distill": ["epochs=0.01", "student.layers=1"],
        "prune": ["rows=16", "multiple_of=8", *(["recover.epochs=0.01"] if getattr(stage, "recover", None) else [])],
        "quantize": ["calibration.rows=16", *(["qat.epochs=0.01"] if getattr(stage, "mode", "ptq") != "ptq" else [])],
        "cascade": ["max_disagreement=0.5"],
        "triton_repo": ["serve=false"],
    }
    return few.get(stage.NAME, [])


def by_own_id(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Returns the stages that a recipe lists, before families are expanded, by id; a stage of a family is one of its members."""
    entries = [next(iter(entry.items())) for entry in read_file(path)["stages"]]
    ids = [(body or {}).get("id", name) for name, body in entries]
    found = {name: [stage for stage in recipe.stages if str(stage.id) == name or str(stage.id).startswith(f"{name}-")] for name in ids}
    return {name: stages[-1] for name, stages in found.items()}


TRAIN, TEST = 96, 40
"""Rows of the splits."""
CLASSES = 10
"""Kinds of images, as many as those of scikit-learn's digits."""
STANDS_FOR = {"tensorrt": "onnxruntime", "openvino": "onnxruntime"}
"""The engine of a test by the first engine of a recipe: it runs on any CPU, and opens in a tenth of the time."""
SLOW = {
    *("sst2-minilm-family", "tinyshakespeare-moe", "wikitext2-gpt-minitron", "flickr30k-clip", "stsb-embedding-pruned", "wikitext2-gpt"),
    *("mrpc-minilm-search", "cifar10-vit-search", "stsb-minilm-search", "squad-minilm-qat", "sst2-minilm-search"),
}
"""Recipes whose tasks and stages other recipes have too; they run with the slow tests."""


@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem) for path in RECIPES])
def test_recipe_runs_shrunk(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("openvino", "openvino_genai", "openvino_seq2seq"):
        monkeypatch.setattr(f"export.engines.{engine}.computes_bf16", lambda: False)  # one float build
    without_clocks.hurry(monkeypatch)
    recipe = read(path)
    monkeypatch.setattr("compress.run.timer.Timer.__call__", without_clocks.by_size)
    stages = {str(stage.id or stage.NAME): stage.NAME for stage in recipe.stages}
    timed = without_clocks.falling if "cascade" in stages.values() else without_clocks.measure  # whose first tier has to be the faster one
    monkeypatch.setattr("foundation.measure.latency.measure", timed)
    settings = [f"stages.{name}.{change}" for name, stage in by_own_id(path, recipe).items() for change in one_step(stage)]
    settings += shrunk(recipe, tmp_path)
    facts, engine = recipe.model.facts, engine_of(recipe)
    outcome = run(read(path, settings), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    checkpoints = [name for name, stage in stages.items() if stage not in ("export", "cascade", "triton_repo")]
    assert [variant["id"] for variant in report["variants"]][-len(checkpoints) :] == checkpoints
    cells = report["variants"][-1]["accuracy"]
    cell = cells[engine]
    assert cell["n"] == (cells["torch"]["n"] if facts.generates else TEST)
    assert cell["n"] >= TEST
    assert cell["low"] <= cell["value"] <= cell["high"]
    assert report["metric"] == {
        "name": facts.metric,
        "higher_is_better": METRICS[facts.metric].higher_is_better,
        "chance": report["metric"]["chance"],
    }
    assert undocumented(report) == []
    assert (outcome.folder / "model_repository").exists() == ("triton_repo" in stages.values())


def engine_of(recipe: Recipe) -> str:
    """Returns the engine of a test."""
    return STANDS_FOR.get(recipe.target.engines[0], recipe.target.engines[0])


def shrunk(recipe: Recipe, folder: Path) -> list[str]:
    """Writes rows for a recipe, and a tiny model; returns the settings that make the recipe take them, and run on any CPU."""
    stages = {str(stage.id or stage.NAME): stage.NAME for stage in recipe.stages}
    settings = [f"stages.{stage.id}.augment=null" for stage in recipe.stages if getattr(stage, "augment", None)]  # no mask token
    generates = recipe.model.facts.generates
    few = ("prompts=4", "tokens=3")
    settings += [f"stages.{name}.generation.{one}" for name, stage in stages.items() if stage == "export" and generates for one in few]
    settings += [f"target={{device: cpu, engines: [{engine_of(recipe)}], batch_sizes: [1], sequence_lengths: [8], threads: 1}}"]
    facts = recipe.model.facts
    by_form = {Tokens: generation_settings, Tags: entity_settings, Spans: question_settings, Candidates: reranking_settings}
    by_form |= dict.fromkeys((Pairs, Judged), embedding_settings)
    by_modality = {"image": tower_settings if facts.two_towers else image_settings, "audio": audio_settings}
    write = by_modality[facts.modality] if facts.modality in by_modality else by_form.get(facts.answer.form, text_settings)
    return settings + write(recipe, folder)


def text_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes sentences with random labels under the column names of the recipe, and names a tiny model with a word vocabulary."""
    columns, random = recipe.data.columns.model_dump(exclude_none=True), np.random.default_rng(0)
    facts = recipe.model.facts
    (folder / "data").mkdir()
    for split, count in {"train": TRAIN, "test": TEST}.items():
        with (folder / "data" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns.values()))
            writer.writeheader()
            texts = iter(sentiment.rows(2 * count))
            for row in range(count):
                values = {key: next(texts) for key in columns if key != "label"}
                label: object = ("negative", "positive")[row % 2]
                if facts.regression:
                    label = round(random.uniform(0, 5), 2)
                elif facts.multi_label:
                    label = ("", "negative", "positive", "negative, positive")[row % 4]
                writer.writerow({columns[key]: value for key, value in {**values, "label": label}.items()})
    certify = []
    if recipe.data.certify is not None:
        (folder / "data" / "certify.txt").write_text("".join(f"{text}\n" for text in sentiment.rows(400)[300:]))
        certify = ["data.certify={files: [{file: certify.txt, header: false, columns: {text: 0}}], shared: drop}"]
    layers = 2 if not (facts.regression or facts.multi_label) and any(stage.NAME == "distill" for stage in recipe.stages) else 1
    model = [f"model.path={sentiment.checkpoint(layers)}"]
    if recipe.model.path is None:
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
        sizes |= {"max_position_embeddings": sentiment.LENGTH}
        model = [*(f"model.config.{key}={value}" for key, value in sizes.items()), f"tokenizer={sentiment.checkpoint(layers)}"]
    return [*model, f"data.path={folder / 'data'}", "data.files=null", "data.max_length=16", *certify]


def entity_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes sentences with entities under the column names of the recipe, and names a tiny model."""
    tokens, label = recipe.data.columns.tokens, recipe.data.columns.label
    (folder / "data").mkdir()
    for split, count in {"train": TRAIN, "test": TEST}.items():
        rows = [{tokens: words, label: tags} for words, tags in entities.sentences(count, seed=count)]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.path={entities.checkpoint()}", f"data.path={folder / 'data'}", "data.files=null", "data.max_length=32"]


def question_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes questions with contexts, some of several windows, and names a tiny model."""
    data = questions.write(folder / "data", {"train": TRAIN, "test": TEST})
    return [f"model.path={questions.checkpoint()}", f"data.path={data}", f"data.max_length={questions.LENGTH}", "data.stride=12"]


def embedding_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes pairs of sentences with scores, or queries and documents, and names a tiny model of sentence-transformers."""
    model = [f"model.path={tiny_embedding.folder(folder / 'source')}", "data.max_length=16"]
    if recipe.model.facts.searches:
        return [*model, f"data.path={tiny_collection.folder(folder / 'data', train=30)}"]
    columns = recipe.data.columns.model_dump(exclude_none=True)
    data = tiny_embedding.pairs(folder / "data", TRAIN, TEST, names=(columns["text"], columns["text_pair"], columns["label"]))
    return [*model, f"data.path={data}", "data.files=null"]


def reranking_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes queries with candidates, and names a tiny model with one output."""
    data, model = tiny_collection.folder(folder / "data", train=30), tiny_collection.cross_encoder(folder / "source")
    return [f"model.path={model}", f"data.path={data}", "data.max_length=16"]


def generation_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes lines of text under the column name of the recipe; the model gets one layer or two, the tokenizer few tokens.

    GPT-2 has the sizes and the activation of `tiny_gpt`, whose graph other tests trace, too.
    """
    (folder / "data").mkdir()
    for seed, (split, count) in enumerate({"train": TRAIN, "test": 60}.items()):
        lines = tiny_gpt.text(count, seed).splitlines(keepends=True)
        names = list(recipe.data.columns.model_dump(exclude_none=True).values())  # a text, or a source and a target
        rows = "".join(json.dumps(dict.fromkeys(names, line.strip() or "a")) + "\n" for line in lines)
        (folder / "data" / f"{split}.jsonl").write_text(rows)
    sizes = {
        "gpt2": {**tiny_gpt.CONFIGS["gpt2"], "activation_function": "gelu_new"},
        "t5": {"num_layers": 1, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_heads": 2},
        "mixtral": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "max_position_embeddings": 16,
        },
    }[recipe.model.config["model_type"]]
    smaller = [f"model.config.{key}={value}" for key, value in sizes.items()]
    return [f"data.path={folder / 'data'}", "data.max_length=16", "tokenizer.vocab_size=300", *smaller]


def image_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes random images, a folder for each class; the model gets the sizes of `tiny_vit`, whose graph other tests trace, too."""
    random, channels = np.random.default_rng(0), recipe.model.config.get("num_channels", 3)
    sizes = {name: value for name, value in tiny_vit("tiny")["model"]["config"].items() if name not in ("model_type", "num_channels")}
    for split, count in {"train": TRAIN, "test": TEST}.items():
        for index in range(count):
            target = folder / "data" / split / f"class{index % CLASSES}" / f"{index}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (sizes["image_size"], sizes["image_size"], channels), dtype=np.uint8)
            Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels).save(target)
    return [
        f"data.path={folder / 'data'}",
        "data.columns={image: null, label: null}",
        *(f"model.config.{name}={value}" for name, value in sizes.items()),
    ]


def tower_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes images of three colours, a folder for each class, or digits with captions, and draws a tiny model with two towers."""
    write = tiny_captions.folder if recipe.model.facts.captioned else tiny_towers.folder
    data = write(folder / "data", train=TRAIN, test=TEST)
    own = [f"data.max_length={tiny_towers.LENGTH}"]
    if recipe.model.path is None:
        own.append(f"tokenizer={{train: bpe, vocab_size: {tiny_towers.TOKENS}}}")
        model = json.dumps({"path": None, "config": tiny_towers.config(), "init": "random"})
    else:
        model = json.dumps({"path": str(tiny_towers.checkpoint(folder / "model"))})
    told = ['data.prompts=["a photo of a {}", "something {}"]', "data.columns={image: null, label: null}"]
    told = [] if recipe.model.facts.captioned else told
    return [f"model={model}", *own, *told, f"data.path={data}", "target.sequence_lengths=[8]"]


def audio_settings(recipe: Recipe, folder: Path) -> list[str]:
    """Writes short sounds, a folder for each class or text; the model gets one layer, and one of waveforms its length in samples."""
    data = tiny_sounds.folder(folder / "data", train=TRAIN, test=TEST, longest=0.3)
    one = {"num_feat_extract_layers": 1, "conv_dim": [32], "conv_kernel": [160], "conv_stride": [160]}
    narrow = [f"model.config.{key}={value}" for key, value in one.items()] if "conv_dim" in (recipe.model.config or {}) else []
    lengths = [] if recipe.data.max_seconds is None else ["data.max_seconds=0.3", "target.sequence_lengths=[2400]"]
    return [
        f"data.path={data}",
        "data.columns={audio: null, label: null}",
        "model.config.num_hidden_layers=1",
        "model.config.hidden_size=32",
        *narrow,
        *lengths,
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES))
def test_a_copy_of_a_shipped_recipe_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    written = write_copy(name, tmp_path / "mine.yaml")
    assert read(written) == read(ROOT / "recipes" / f"{name}.yaml")
    first, command, *_ = written.read_text(encoding="utf-8").splitlines()
    assert first == f"# {about(ROOT / 'recipes' / f'{name}.yaml')}"
    assert command.startswith(f"# compress run {written}")


def test_a_shipped_recipe_has_a_name_and_a_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sorted(shipped().values()) == RECIPES
    assert find("quickstart") == ROOT / "recipes" / "quickstart.yaml"
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    assert find("runs/quickstart") == Path("runs/quickstart")  # a path is never taken for a name
    (tmp_path / "quickstart").write_text("mine")
    assert find("quickstart") == Path("quickstart")
    assert find("absent.yaml") == Path("absent.yaml")  # whoever reads it says what is wrong
    for wrong in (lambda: find("quickstrat"), lambda: write_copy("quickstrat", tmp_path / "mine.yaml")):
        with pytest.raises(InputError, match=r"shipped: .*; did you mean 'quickstart'\?"):
            wrong()
    assert not (tmp_path / "mine.yaml").exists()
