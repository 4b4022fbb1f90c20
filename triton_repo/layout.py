"""Writes the CPU model repository: one self-contained model folder for each exported build.

    model_repository/
      README.md
      <variant>-<precision>/
        config.pbtxt
        warmup/<bucket>.TEXT          one synthetic row for each bucket
        1/  model.py  settings.json  preprocess.py  long_text.py  windows.py  preprocess.json  tokenizer.json  response.py
            (image.py | sound.py)  engine.py  openvino_request.py  openvino.xml  openvino.bin | model.onnx  *.onnx.data

The mode and the properties of an engine come from export.json, so the server runs exactly what was evaluated.

Not here: the repository for GPUs, see `triton_repo.gpu.plans`.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from foundation.artifacts.artifact import Artifact
from foundation.artifacts.document import read
from foundation.artifacts.exported import Build, Engine, Exported
from foundation.artifacts.triton import TritonModel
from foundation.core.engines import ENGINES, served_on
from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.measure.fastest import Ranked
from foundation.standalone import adapted, image, long_text, preprocess, response, sound, windows
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES, Entities, Label, Labels, Response, Span, Transcript, Vector
from triton_repo.config import (
    ADAPTER,
    AUDIO,
    CONTEXT,
    IMAGE,
    MIN_BATCH,
    QUESTION,
    SETTINGS,
    TEXT,
    TEXT_PAIR,
    ModelSettings,
    Scheduling,
    model_config,
    serialized,
    to_text,
    version_settings,
)

EXPORTED = "export.json"
TEMPLATE, ENGINES_FOLDER = "cpu_model.py", "cpu_engines"
BESIDE_ENGINE: Mapping[str, tuple[str, ...]] = {"openvino": ("openvino_request.py",)}
"""Files of `foundation.standalone` that an engine's own file imports."""
VERSION = "1"
WARM_UP = "warmup"
SHORT: Mapping[str, bytes] = {TEXT_PAIR: b"", QUESTION: b"a"}
"""Second text of warm-up rows, next to the text that fills the bucket."""


@dataclass(frozen=True)
class Served:
    """One model of the repository and its engine."""

    name: str
    variant: str
    precision: str
    folder: Path
    """Folder of the build: preprocess.json, tokenizer.json."""
    engine: Engine
    """The entry of the engine in export.json."""
    root: Path
    """Folder of export.json."""
    tower: str | None = None
    """The rows that it answers, image or text, where a build is served as two models (`foundation.models.heads.towers`); None: all."""
    response: str | None = None
    """Form of its answers, a name in `foundation.standalone.response.RESPONSES`; None: as in the build."""

    @property
    def file(self) -> Path:
        """Path of the file that the engine opens."""
        return self.root / str(self.engine.file)

    @property
    def prepared(self) -> Preprocessor:
        """How its rows are prepared and answered."""
        found = Preprocessor.load(self.folder)
        return found if self.response is None else replace(found, response=self.response)

    @property
    def names(self) -> dict[str, str]:
        """Keys that identify its entry in triton.json."""
        return {
            "model": self.name,
            "variant": self.variant,
            "precision": self.precision,
            "engine": self.engine.engine,
            "mode": self.engine.mode,
            "float_precision": str(self.engine.float_precision),
        }

    @property
    def entry(self) -> TritonModel:
        """Its entry in triton.json, before it is measured."""
        return TritonModel(**self.names)

    def is_the(self, chosen: Ranked) -> bool:
        """Whether it is the configuration that was chosen."""
        return chosen.candidate.names.items() <= self.names.items()

    @property
    def predictions(self) -> Path | None:
        """Path of the engine's predictions on the evaluation split; None if it was not evaluated."""
        return self.root / self.engine.predictions if self.engine.predictions else None


def served_models(
    exported: Artifact, engines: Sequence[str] | Mapping[str, Sequence[str]] | None = None, chosen: Ranked | None = None
) -> list[Served]:
    """Returns a model for each build that one of these engines runs, in the order of export.json.

    Args:
        exported: The artifact of `export`.
        engines: The engines, in order of preference, for all builds or by the folder of each; default: those that are served on the CPU.
            Each build takes the first one that runs, in its recommended mode.
        chosen: What is served: its build takes this engine in this mode.

    Raises:
        InputError: There is no such build.
    """
    engines = served_on("cpu") if engines is None else engines
    found = list(_served(exported.path, engines, chosen))
    if not found:
        names = one_of(engines if not isinstance(engines, Mapping) else sorted({name for names in engines.values() for name in names}))
        raise InputError("target.engines", f"no engine of {names} was built, and the CPU model repository serves {names}", remedy="add one")
    return found


def write_repository(
    out: Path,
    models: list[Served],
    *,
    pairs: bool,
    batch_sizes: tuple[int, ...],
    max_batch_size: int | None = None,
    scheduling: Scheduling | None = None,
    chosen: str | None = None,
) -> list[ModelSettings]:
    """Writes the repository.

    Args:
        out: Folder to write into; created.
        models: The models.
        pairs: Whether rows are pairs of texts.
        batch_sizes: Batch sizes of the static engine; 1 is added.
        max_batch_size: Maximum batch size. Default: the largest of `batch_sizes`, at least 8.
        scheduling: How requests come to each model. Default: one process, no waiting for others, no limits.
        chosen: Name of the model that was chosen to be served, for the README.

    Returns:
        The settings of each model.

    Raises:
        InputError: A model name is invalid, or images have no fixed size.
    """
    largest = max_batch_size or max(MIN_BATCH, *batch_sizes)
    written = []
    for model in models:
        preprocessor = model.prepared
        rows = dict(warm_up_rows(preprocessor, pairs))
        settings = settings_of(model, pairs, batch_sizes, largest, scheduling or Scheduling(), tuple(rows))
        _write_model(out / model.name, model, preprocessor, settings, rows)
        written.append(settings)
    (out / "README.md").write_text(readme(written, chosen), encoding="utf-8")
    return written


def settings_of(
    model: Served, pairs: bool, batch_sizes: Sequence[int], largest: int, scheduling: Scheduling, warm_up: tuple[str, ...]
) -> ModelSettings:
    """Returns the settings of a model.

    Args:
        model: The model.
        pairs: Whether rows are pairs of texts.
        batch_sizes: Batch sizes of the static engine; 1 is added.
        largest: Maximum batch size.
        scheduling: How requests come to it.
        warm_up: Names of its warm-up samples.
    """
    preprocessor = model.prepared
    return ModelSettings(
        name=model.name,
        modality=preprocessor.modality,  # type: ignore[arg-type]
        pairs=pairs,
        width=preprocessor.width,
        response=preprocessor.response,
        engine=model.engine.engine,
        max_batch_size=largest,
        batch_sizes=tuple(size for size in sorted({1, *batch_sizes}) if size <= largest),
        mode=model.engine.mode,
        properties=_properties(model, scheduling),
        warm_up=warm_up,
        scheduling=scheduling,
        adapters=preprocessor.adapters,
    )


def warm_up_rows(preprocessor: Preprocessor, pairs: bool) -> Iterator[tuple[str, bytes]]:
    """Yields the name and a synthetic row of each bucket; for images one grey picture, for sounds a silence that
    fills the bucket.

    Raises:
        InputError: Images have no fixed size, so there is no shape to compile.
    """
    if preprocessor.steps is not None:
        yield "image", row_of_length(preprocessor, None, pairs)
        return
    for bucket in preprocessor.buckets or (() if preprocessor.sounds is None else (sound.FRAME,)):
        yield str(bucket), row_of_length(preprocessor, bucket, pairs)


def row_of_length(preprocessor: Preprocessor, length: int | None, pairs: bool) -> bytes:
    """Returns a synthetic row that just fills a length: a text, a silence, or a grey picture of the only size.

    Raises:
        InputError: Images have no fixed size, so there is no shape to compile.
    """
    if preprocessor.steps is not None:
        if preprocessor.steps.shape is None:
            raise InputError(
                "model",
                "preprocessor_config.json does not resize images to a fixed size",
                remedy="give it size {height, width} or a centre crop",
            )
        _, height, width = preprocessor.steps.shape
        file = io.BytesIO()
        Image.new("L", (width, height), 128).save(file, "PNG")
        return file.getvalue()
    if preprocessor.sounds is not None:
        return sound.silence(length or sound.FRAME, preprocessor.sounds.steps.sampling_rate)
    assert length is not None, "texts have lengths"
    return _text_of_length(preprocessor, length, pairs).encode("utf-8")


def readme(models: list[ModelSettings], chosen: str | None = None) -> str:
    """Returns the README of the repository.

    Args:
        models: Its models.
        chosen: Name of the one that was chosen to be served; None: the last.
    """
    first = next((model for model in models if model.name == chosen), models[-1])
    builds = {model.name: _build_of(model) for model in models}
    served = {model.name: " (serve this one)" * (builds[model.name] == builds[first.name]) for model in models}
    lines = "\n".join(
        f"| `{model.name}`{served[model.name]} | {', '.join(model.inputs)} | {model.max_batch_size} | "
        f"{ENGINES[model.engine].title}, {model.mode} |"
        for model in models
    )
    packages = " ".join(sorted({ENGINES[model.engine].library for model in models}))
    inputs = ", ".join(f'"ADAPTER": "{first.adapters[0]}"' if name == ADAPTER else _example(name) for name in first.inputs)
    more = " soundfile soxr" if AUDIO in first.inputs else ""
    answer = ", ".join(f'answer.as_numpy("{output.name}")[0]' for output in RESPONSES[first.response].outputs(first.width))
    kinds = " or ".join(dict.fromkeys(_KINDS.get(name, "UTF-8 text") for model in models for name in model.inputs if name != ADAPTER))
    if first.adapters:
        kinds += f"; ADAPTER names what answers a row: {', '.join(first.adapters)}"
    outputs = _OUTPUTS[type(RESPONSES[first.response])]
    return _README.format(
        lines=lines, name=first.name, inputs=inputs, packages=packages, more=more, answer=answer, kinds=kinds, outputs=outputs
    )


def _build_of(model: ModelSettings) -> str:
    """Returns the name of the build that a model serves, alone or as one of two towers."""
    return re.sub("-(image|text)$", "", model.name) if model.response == "vector" else model.name


def _properties(model: Served, scheduling: Scheduling) -> dict[str, str]:
    """Returns the settings of a model's engine: those that were evaluated, with other threads where these are given."""
    found = dict(model.engine.properties)
    if scheduling.threads is not None:
        found[ENGINES[model.engine.engine].threads_property] = str(scheduling.threads)
    return found


def _served(root: Path, engines: Sequence[str] | Mapping[str, Sequence[str]], chosen: Ranked | None) -> Iterator[Served]:
    for build in read(Exported, root / EXPORTED).builds:
        order = engines[build.folder] if isinstance(engines, Mapping) else engines
        entries = [entry for entry in build.engines if entry.engine in order and entry.runnable]
        entries.sort(key=lambda entry: (chosen is not None and chosen.candidate.key != build.key(entry), order.index(entry.engine)))
        for entry in entries[:1]:
            model = served_build(root, build, entry)
            yield from towers_of(model) if entry.towers else [model]


def served_build(root: Path, build: Build, entry: Engine) -> Served:
    """Returns the model that a build is served as in one of its engines.

    Args:
        root: Folder of the artifact of `export`.
        build: The build.
        entry: The engine.
    """
    return Served(f"{build.variant}-{build.precision}", build.variant, build.precision, root / build.folder, entry, root)


def towers_of(model: Served) -> list[Served]:
    """Returns the two models that a build with two towers is served as."""
    return [
        replace(model, name=f"{model.name}-{tower}", folder=model.folder / tower, engine=model.engine.with_(file=file), tower=tower)
        for tower, file in model.engine.towers.items()
    ]


def _write_model(folder: Path, model: Served, preprocessor: Preprocessor, settings: ModelSettings, rows: Mapping[str, bytes]) -> None:
    warm_up = folder / WARM_UP
    warm_up.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(to_text(model_config(settings)), encoding="utf-8")
    write_version(folder / VERSION, model, preprocessor, settings)
    for name, row in rows.items():
        for column in settings.inputs:
            value = settings.adapters[0].encode() if column == ADAPTER else SHORT.get(column, row)
            (warm_up / f"{name}.{column}").write_bytes(serialized([value]))


def write_version(version: Path, model: Served, preprocessor: Preprocessor, settings: ModelSettings) -> None:
    """Writes what a version of a model holds into a new folder."""
    version.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name(TEMPLATE), version / "model.py")
    shared = [str(Path(preprocess.__file__).with_name(name)) for name in BESIDE_ENGINE.get(settings.engine, ())]
    for file in (preprocess.__file__, long_text.__file__, response.__file__, windows.__file__, *beside(preprocessor), *shared):
        shutil.copyfile(file, version / Path(file).name)
    (version / SETTINGS).write_text(version_settings(settings), encoding="utf-8")
    preprocessor.save(version)
    shutil.copyfile(Path(__file__).parent / ENGINES_FOLDER / f"{settings.engine}.py", version / "engine.py")
    for source, name in _files(model.file):
        shutil.copyfile(source, version / name)


def beside(preprocessor: Preprocessor) -> list[str]:
    """Returns the paths of the files that preprocess.py needs next to it for rows of this kind."""
    kinds = ((image, preprocessor.image), (sound, preprocessor.sound), (adapted, preprocessor.adapters or None))
    return [str(module.__file__) for module, used in kinds if used is not None]


def _files(file: Path) -> Iterator[tuple[Path, str]]:
    """Yields the files of an engine, and what they are called in the server."""
    if file.suffix == ".xml":
        yield from ((file.with_suffix(suffix), f"openvino{suffix}") for suffix in (".xml", ".bin"))
        return
    yield file, "model.onnx"
    data = file.with_name(f"{file.name}.data")  # the graph names it
    if data.exists():
        yield data, data.name


def _text_of_length(preprocessor: Preprocessor, bucket: int, pairs: bool) -> str:
    """Returns a text that just fills a bucket; the second text of a pair is empty, and a question is `SHORT`."""

    def tokens(words: int) -> int:
        text = " ".join(["a"] * words)
        if preprocessor.finds_spans:
            (asked,) = windows.paired(preprocessor.tokenizer, [(SHORT[QUESTION].decode(), text)])
            return len(asked.ids)
        row = (text, "") if pairs else text
        rows = [adapted.with_adapter(row, preprocessor.adapters[0]) if preprocessor.adapters else row]
        return int(preprocessor.encode(rows, 0)[preprocessor.input_names[0]].shape[1])

    words = bucket
    while words and (length := tokens(words)) > bucket:
        words = max(0, words - max(1, (length - bucket) // 2))
    return " ".join(["a"] * max(words, preprocessor.finds_spans))


def _example(name: str) -> str:
    return {
        TEXT: '"TEXT": "a fine film"',
        TEXT_PAIR: '"TEXT_PAIR": "a good movie"',
        QUESTION: '"QUESTION": "Who won?"',
        CONTEXT: '"CONTEXT": "The Denver Broncos won."',
        IMAGE: '"IMAGE": open("image.png", "rb").read()',
        AUDIO: '"AUDIO": open("sound.wav", "rb").read()',
    }[name]


_KINDS = {IMAGE: "the bytes of a PNG or JPEG file", AUDIO: "the bytes of a WAV or FLAC file"}
"""What an input holds; every other one holds UTF-8 text."""
_OUTPUTS: Mapping[type[Response], str] = {
    Label: """`LABEL` (string [n, 1]), `SCORE` (float32 [n, 1]: the softmax score of the label, the value of a regression, or the logit of a
cross-encoder) and `LOGITS` (float32 [n, C])""",
    Labels: """`LABEL` (string [n, C]: all labels, the most likely first), `SCORE` (float32 [n, C]: a label holds if its score is above 0.5)
and `LOGITS` (float32 [n, C])""",
    Vector: "`VECTOR` (float32 [n, D])",
    Entities: """`ENTITIES` (string [n, 1]: a JSON list of objects with entity, start, end, score and text) and `LOGITS` of all tokens
(float32 [n, L, C])""",
    Span: """`ANSWER` (string [n, 1]: a JSON object with text, start, end, score, null_score and probability) and `LOGITS` of all windows of
the context (float32 [n, L, 2])""",
    Transcript: "`TRANSCRIPT` (string [n, 1]: the text) and `LOGITS` of all frames (float32 [n, F, V])",
}
"""What a model returns."""
_README = """\
# Model repository for Triton Inference Server, CPU

| model | inputs | max batch size | engine |
|---|---|---|---|
{lines}

Inputs are strings of shape [n, 1]: {kinds}. Outputs are
{outputs}.

Each model is a Python model that tokenizes the text or decodes the image or sound, runs its engine and returns the answer. In a Triton
container with the Python backend, whose Python needs `numpy` below 2:

    pip install 'numpy<2' {packages} tokenizers pillow{more}
    tritonserver --model-repository=/models --disable-auto-complete-config

Send a request:

    import numpy as np, tritonclient.grpc as grpc
    client = grpc.InferenceServerClient("127.0.0.1:8001")
    row = {{{inputs}}}
    tensors = []
    for name, value in row.items():
        tensors.append(grpc.InferInput(name, [1, 1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([[value]], dtype=object))
    answer = client.infer("{name}", tensors)
    print({answer})
"""
