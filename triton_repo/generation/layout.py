"""Writes the model repository of language models: one folder for each exported build, with all that its answers need.

    model_repository/
      README.md
      <variant>-<precision>/
        config.pbtxt
        1/  model.py request.py answer.py engine.py ...   genai/ (what OpenVINO GenAI reads), onnx/ (ONNX Runtime)
                                                      or seq2seq/ (of an encoder-decoder)
            draft/                                      the draft model that proposes tokens, if there is one

Mode and properties come from export.json, so the server runs exactly what was evaluated.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from foundation.core.answer_tokens import AnswerTokens
from foundation.core.engines import ENGINES
from foundation.core.json_value import Json
from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.standalone import (
    chat_template,
    decoding_rules,
    draft_folder,
    encoder_decoder,
    language_text,
    onnx_decoder,
    openvino_request,
    pieces,
    stretches,
)
from foundation.standalone.preprocess import Preprocessor
from triton_repo.config import MIN_BATCH, to_text
from triton_repo.generation import served
from triton_repo.generation.config import OUTPUTS, PROMPTS, LanguageSettings, language_config
from triton_repo.generation.limits import MAX_WAITING, REQUEST_SECONDS
from triton_repo.generation.served.request import FIELDS
from triton_repo.layout import VERSION, Served

GENAI, ONNX, SEQ2SEQ, DRAFT = "genai", "onnx", "seq2seq", "draft"
UNLIMITED_CONTEXT = 2048
"""Context of a model whose positions have no end (ALiBi, T5)."""
FILES = ("model.py", "request.py", "answer.py", "engine.py", "guests.py", "messages.py", "opened.py", "outbox.py")
LOGITS = ("logprobs.py", "searching.py", "structures.py")
"""Files of a model whose logits are ours."""
STANDALONE = (chat_template, language_text, pieces)


@dataclass(frozen=True)
class Parts:
    """Files of a model besides `FILES` and `STANDALONE`."""

    folder: str
    """Folder that its engine reads."""
    files: tuple[str, ...]
    standalone: tuple[ModuleType, ...] = ()
    """Modules of `foundation.standalone`."""


PARTS = {
    "openvino_genai": Parts(GENAI, ("genai.py", "paged.py", "stateful.py"), (draft_folder, stretches)),
    "onnxruntime_decoder": Parts(ONNX, ("onnx.py", "batched.py", *LOGITS), (onnx_decoder, decoding_rules)),
    "openvino_seq2seq": Parts(SEQ2SEQ, ("seq2seq.py", "grouped.py", *LOGITS), (encoder_decoder, openvino_request, decoding_rules)),
}
"""Keyed by engine."""


def write_language_repository(
    out: Path,
    models: list[Served],
    *,
    batch_sizes: tuple[int, ...],
    max_batch_size: int | None = None,
    proposals: bool = False,
    max_waiting: int = MAX_WAITING,
    request_seconds: float = REQUEST_SECONDS,
) -> list[LanguageSettings]:
    """Writes the repository.

    Args:
        out: Folder to write into; created.
        models: The models.
        batch_sizes: Batch sizes of the target.
        max_batch_size: Answers that run at once, where the model can do that. Default: the largest of `batch_sizes`, at least 8.
        proposals: Whether tokens are proposed to models for which the export measured that.
        max_waiting: Requests that wait.
        request_seconds: Most time for an answer, with the time that its request waits.

    Returns:
        The settings of each model.

    Raises:
        InputError: A model name is invalid.
    """
    written = []
    for model in models:
        config, encodes = Checkpoint(model.file.parent).config, ENGINES[model.engine.engine].generates == "encoder-decoder"
        at_once = model.engine.mode in ("paged", "batched") or encodes
        settings = LanguageSettings(
            name=model.name,
            mode=model.engine.mode,
            architecture="encoder_decoder" if encodes else "decoder",
            properties=model.engine.properties,
            context=most_tokens(config.get_text_config()) or UNLIMITED_CONTEXT,
            vocabulary=int(config.get_text_config().vocab_size),
            max_running=(max_batch_size or max(MIN_BATCH, *batch_sizes)) if at_once else 1,
            special=_special(model) if encodes else {},
            proposals=_proposals(model) if proposals else {},
            max_waiting=max_waiting,
            request_seconds=request_seconds,
        )
        _write_model(out / model.name, model, settings)
        written.append(settings)
    (out / "README.md").write_text(readme(written), encoding="utf-8")
    return written


def _proposals(model: Served) -> dict[str, Json]:
    """Returns the draft that proposes tokens to a model; empty without one."""
    speculation = model.engine.speculation
    if speculation is None:
        return {}
    return {"tokens": speculation["tokens"], "draft": speculation["file"] is not None, "properties": speculation["properties"]}


def _special(model: Served) -> dict[str, Json]:
    """Returns the ids of `served.grouped.Special`."""
    tokens = AnswerTokens.of_folder(model.file.parent)
    prepared = Preprocessor.load(model.folder)
    return {
        "start": prepared.decoder_start_token_id,
        "pad": prepared.pad_token_id,
        "ends": list(tokens.ends),
        "first": tokens.first,
    }


def _write_model(folder: Path, model: Served, settings: LanguageSettings) -> None:
    version = folder / VERSION
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(to_text(language_config(settings)), encoding="utf-8")
    parts = PARTS[model.engine.engine]
    for name in (*FILES, *parts.files):
        shutil.copyfile(Path(next(iter(served.__path__)), name), version / name)
    for module in (*STANDALONE, *parts.standalone):
        shutil.copyfile(str(module.__file__), version / Path(str(module.__file__)).name)
    shutil.copytree(model.file.parent, version / parts.folder)
    if settings.proposals.get("draft") and model.engine.speculation is not None:
        shutil.copytree((model.root / model.engine.speculation["file"]).parent, version / DRAFT)


def readme(models: list[LanguageSettings]) -> str:
    """Returns the README of the repository."""
    lines = "\n".join(
        f"| `{model.name}` | {model.mode} | {model.max_running} | {model.max_waiting} | {model.request_seconds:g} | {model.context} "
        f"| {_proposing(model)} |"
        for model in models
    )
    fields = [(field.name, field.datatype, 1, f"{field.allowed} | {field.meaning}") for field in FIELDS]
    inputs = "\n".join(_row(*row) for row in [*((name, type, size, f"| {text}") for name, (type, size, text) in PROMPTS.items()), *fields])
    outputs = "\n".join(_row(name, *about) for name, about in OUTPUTS.items())
    return _README.format(lines=lines, inputs=inputs, outputs=outputs, name=models[0].name)


def _proposing(model: LanguageSettings) -> str:
    if not model.proposals:
        return "nothing"
    return f"{'a draft' if model.proposals['draft'] else 'the text'}, {model.proposals['tokens']} at once"


def _row(name: str, datatype: str, size: int, meaning: str) -> str:
    return f"| `{name}` | {datatype.removeprefix('TYPE_').lower()} [{'n' if size < 0 else size}] | {meaning} |"


_README = """\
# Language models for Triton Inference Server, CPU

| model | mode | answers at once | waiting requests | seconds for an answer | context | proposes tokens |
|---|---|---|---|---|---|---|
{lines}

The models stream: each request gets one response for each piece of its answer. `paged`, `batched`: the model answers several requests
at once (continuous batching). `stateful`: one request after the other, because its attention needs it; an encoder-decoder answers those
together that wait together. Each beam of a search takes the place of an answer, and the search waits until all of them fit. A request that
finds the queue full is refused, and so is a search with more beams than places. The numbers are `parameters` in config.pbtxt.

Inputs; one prompt is needed, all else may be left out:

| input | type | allowed | meaning |
|---|---|---|---|
{inputs}

Outputs:

| output | type | meaning |
|---|---|---|
{outputs}

To cancel an answer, close its stream. The Python of the server needs `numpy` below 2, `openvino`, `openvino-genai`, `tokenizers`, `jinja2`,
for `batched` also `onnxruntime`, and `llguidance` for JSON_SCHEMA and REGEX. In a Triton container with the Python backend:

    pip install 'numpy<2' openvino openvino-genai tokenizers jinja2 onnxruntime llguidance
    tritonserver --model-repository=/models --disable-auto-complete-config

With curl:

    curl -N http://127.0.0.1:8000/v2/models/{name}/generate_stream -d '{{"TEXT": "Once upon a time", "MAX_TOKENS": 40}}'

In Python:

    import queue, numpy as np, tritonclient.grpc as grpc
    answers, client = queue.Queue(), grpc.InferenceServerClient("127.0.0.1:8001")
    text, most = grpc.InferInput("TEXT", [1], "BYTES"), grpc.InferInput("MAX_TOKENS", [1], "INT32")
    text.set_data_from_numpy(np.array([b"Once upon a time"], dtype=object))
    most.set_data_from_numpy(np.array([40], dtype=np.int32))
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("{name}", [text, most])
    while True:
        result, error = answers.get()
        if error:
            raise error
        print(result.as_numpy("TEXT")[0].decode(), end="", flush=True)
        if result.as_numpy("FINISH_REASON") is not None:
            break
    client.stop_stream()
"""
