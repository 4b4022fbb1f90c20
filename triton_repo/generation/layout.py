"""Writes the model repository of language models: one folder for each exported build, with all that its answers need.

    model_repository/, or model_repository_kernels/ for our kernels
      README.md
      <variant>-<precision>/
        config.pbtxt
        1/  model.py request.py answer.py engine.py ...   genai/ (what OpenVINO GenAI reads), onnx/ (ONNX Runtime),
                                                      seq2seq/ (of an encoder-decoder) or kernels/ (plan.safetensors)
            draft/                                      the draft model that proposes tokens, if there is one
            kernel_decoder.py  packages/                of kernels: what runs the plan, and our modules that it imports

Mode and properties come from export.json, so the server runs exactly what was evaluated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from triton_repo.generation.config import LanguageSettings, language_config
from triton_repo.generation.limits import MAX_WAITING, REQUEST_SECONDS
from triton_repo.generation.readme import readme
from triton_repo.layout import VERSION, Served
from triton_repo.own_modules import ROOT, modules

GENAI, ONNX, SEQ2SEQ, KERNELS, DRAFT, PACKAGES = "genai", "onnx", "seq2seq", "kernels", "draft", "packages"
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
    ours: tuple[str, str] | None = None
    """A module of another package of ours, and its name in the folder; what it imports comes along. Such models run on GPUs."""


PARTS = {
    "openvino_genai": Parts(GENAI, ("genai.py", "paged.py", "stateful.py"), (draft_folder, openvino_request, stretches)),
    "onnxruntime_decoder": Parts(ONNX, ("onnx.py", "batched.py", *LOGITS), (onnx_decoder, decoding_rules)),
    "torch_kernels_decoder": Parts(
        KERNELS,
        ("kernels.py", "batched.py", *LOGITS),
        (decoding_rules,),
        ours=("export/fused/decoder/served.py", "kernel_decoder.py"),
    ),
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
        on_gpus = PARTS[model.engine.engine].ours is not None
        at_once = model.engine.mode in ("paged", "batched") or encodes or on_gpus
        settings = LanguageSettings(
            name=model.name,
            mode=model.engine.mode,
            architecture="encoder_decoder" if encodes else "decoder",
            properties={**model.engine.properties, **({"float_precision": str(model.engine.float_precision)} if on_gpus else {})},
            context=most_tokens(config.get_text_config()) or UNLIMITED_CONTEXT,
            vocabulary=int(config.get_text_config().vocab_size),
            max_running=(max_batch_size or max(MIN_BATCH, *batch_sizes)) if at_once else 1,
            special=_special(model) if encodes else {},
            proposals=_proposals(model) if proposals else {},
            max_waiting=max_waiting,
            request_seconds=request_seconds,
            on_gpus=on_gpus,
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
    for source, place in _brought(parts):
        (version / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, version / place)
    shutil.copytree(model.file.parent, version / parts.folder)
    if settings.proposals.get("draft") and model.engine.speculation is not None:
        shutil.copytree((model.root / model.engine.speculation["file"]).parent, version / DRAFT)


def _brought(parts: Parts) -> Iterator[tuple[Path, str]]:
    """Yields the files of our other packages that a model needs, and their places in its folder."""
    if parts.ours is None:
        return
    start, name = parts.ours
    yield ROOT / start, name
    for path in modules(ROOT / start, ROOT):
        yield path, f"{PACKAGES}/{path.relative_to(ROOT).as_posix()}"
