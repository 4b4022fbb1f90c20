"""The recipe that `compress init` writes: a commented one for each task, or a copy of a shipped one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from compress.commands.recipes import copy_of
from compress.core.errors import InputError, nearest
from compress.core.tasks import TASKS
from compress.measure.metrics import primary

HEAD = """\
# {about}
# compress run {file}
name: {name}
seed: 0
"""

TEXT_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: it is fine-tuned already; new: put a new head on it (then finetune comes first)
data:
  path: {data}   # Hub id, or a folder or file of csv, tsv, json, jsonl or parquet
  subset: {subset}   # configuration of the Hub data set; ignored for local folders
  columns: {columns}
  max_length: 128   # tokens; longer rows are truncated
"""

GENERATION_MODEL = """\
model:
  config: {{model_type: gpt2, n_layer: 4, n_embd: 256, n_head: 8, n_positions: 128}}   # or path: Hub id or local folder of a trained model
  init: random
  task: {task}
tokenizer: {{train: bpe, vocab_size: 2048}}   # on the train split; leave it out for a trained model
data:
  path: {data}   # Hub id, or a folder or file of txt, csv, tsv, json, jsonl or parquet
  subset: {subset}   # configuration of the Hub data set; ignored for local folders
  columns: {columns}
  max_length: 128   # tokens of a block: the text is cut into such
"""

IMAGE_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: it is fine-tuned already; new: put a new head on it (then finetune comes first)
data:
  path: {data}   # Hub id, a folder split/class/file.jpg, or tar.gz archives of the same
  columns: {columns}
"""

TAIL = """\
goals:
  max_drop: {drop}
  min_speedup: {speedup}      # against torch fp32 eager, at the worst shape below
target:
  device: cpu
  engines: [openvino, onnxruntime]   # the first is judged and served; add tensorrt for NVIDIA GPUs
  batch_sizes: [1, 8]
{lengths}stages:
{finetune}  # - distill: {{student: {{layers: {layers}}}, loss: {loss}, epochs: 3}}   # a student of fewer layers
  # - prune: {{sparsity: 0.5}}   # half of the blocks' multiplications less, and training to make up for it
  - quantize: {{mode: ptq}}   # true int8, calibrated on training rows; qat: trained in int8; auto: as much as max_drop needs
  - export: {{}}              # ONNX with Q/DQ, engines, parity checks
{triton}"""
TRITON = "  - triton_repo: {}         # a Triton model repository, started and checked\n"
DROPS = {True: "0.02        # perplexity may rise by 2 %", False: "0.01        # at most one point of the primary metric"}


def template(task: str, file: str) -> str:
    """Returns the text of a recipe for `task`, to be kept as `file`.

    Raises:
        InputError: There is no such task.
    """
    if task not in TASKS:
        raise InputError(f"--task {task}: unknown; allowed: {', '.join(TASKS)}{nearest(task, TASKS)}")
    row = TASKS[task]
    values = {**asdict(row.example), "task": task, "file": file}
    generates = row.answer == "tokens"
    values["lengths"] = "" if row.modality == "image" else "  sequence_lengths: [32, 128]\n"
    training = "{epochs: 3, learning_rate: 1.0e-3, schedule: cosine}" if generates else "{epochs: 3}"
    values["finetune"] = f"  - finetune: {training}\n" if values["head"] == "new" else ""
    values["layers"], values["loss"] = ("2", "soft_target") if generates else ("6" if row.modality == "image" else "3", "minilm")
    values["drop"] = DROPS[primary(task).relative]
    values["speedup"], values["triton"] = ("2.0", "") if generates else ("3.0", TRITON)
    body = IMAGE_MODEL if row.modality == "image" else GENERATION_MODEL if generates else TEXT_MODEL
    return (HEAD + body + TAIL).format(**values)


def write_template(task: str, output: Path) -> Path:
    """Writes a commented recipe for `task`.

    Raises:
        InputError: There is no such task, or `output` exists already.
    """
    return _write(template(task, str(output)), output)


def write_copy(recipe: str, output: Path) -> Path:
    """Writes a copy of a shipped recipe.

    Raises:
        InputError: There is no such recipe, or `output` exists already.
    """
    return _write(copy_of(recipe, str(output)), output)


def _write(text: str, output: Path) -> Path:
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InputError(f"{output}: exists already; give another file with -o") from error
    except FileNotFoundError as error:
        raise InputError(f"{output}: its folder does not exist; make it, or give another file with -o") from error
    return output
