"""`compress init`: writes a commented recipe for a task, or a copy of a shipped recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from compress.commands.recipes import copy_of
from foundation.core.engines import served_on
from foundation.core.errors import InputError, nearest
from foundation.core.files import local
from foundation.core.shown import pasted
from foundation.labels.tasks import TASKS
from foundation.measure.metrics import primary

HEAD = """\
# {about}
# {command}
name: {name}
seed: 0
"""

TEXT_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: already fine-tuned; new: add a new head (finetune must come first)
data:
  path: {data}   # Hub id, or a folder or file of csv, tsv, json, jsonl or parquet
  subset: {subset}   # configuration of the Hub data set; ignored for local files
  columns: {columns}
  max_length: 128   # tokens; longer rows are truncated
"""

QUESTION_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: already fine-tuned; new: add a new head (finetune must come first)
data:
  path: {data}   # Hub id, or a folder or file of json in the form of SQuAD, or of json, jsonl or parquet with these columns
  columns: {columns}
  max_length: 384   # tokens of question and context; longer contexts are divided into windows
  stride: 128   # tokens that two windows share
"""

SEARCH_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
data:
  path: {data}   # a folder in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/test.tsv
{more}  max_length: 256   # tokens; longer texts are truncated
"""

GENERATION_MODEL = """\
model:
  config: {{model_type: gpt2, n_layer: 4, n_embd: 256, n_head: 8, n_positions: 128}}   # or path: Hub id or local folder of a trained model
  init: random
  task: {task}
tokenizer: {{train: bpe, vocab_size: 2048}}   # trained on the train split; leave it out for a trained model
data:
  path: {data}   # Hub id, or a folder or file of txt, csv, tsv, json, jsonl or parquet
  subset: {subset}   # configuration of the Hub data set; ignored for local files
  columns: {columns}
  max_length: 128   # tokens of a block; the text is cut into blocks
"""

TEXT_TO_TEXT_MODEL = """\
model:
  config: {{model_type: t5, num_layers: 3, d_model: 256, d_kv: 64, d_ff: 512, num_heads: 4}}   # or path: Hub id or local folder
  init: random
  task: {task}
tokenizer: {{train: bpe, vocab_size: 4096}}   # trained on the train split; leave it out for a trained model
data:
  path: {data}   # Hub id, a folder or file of csv, tsv, json, jsonl or parquet, or a folder with train.en and train.de, line by line
  subset: {subset}   # configuration of the Hub data set; ignored for local files
  columns: {columns}
  max_length: 64   # tokens of a source, and of a target; longer ones are truncated
"""

IMAGE_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: already fine-tuned; new: add a new head (finetune must come first)
data:
  path: {data}   # Hub id, a folder split/class/file.jpg, or tar.gz archives of such folders
  columns: {columns}
"""

TOWERS_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
data:
  path: {data}   # {where}
  columns: {columns}
{more}  max_length: 77   # tokens; a SigLIP reads 64
"""

AUDIO_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: already fine-tuned; new: add a new head (finetune must come first)
data:
  path: {data}   # Hub id, folders split/class/file.wav (or .flac), tar.gz archives of such folders, or tables with paths
  columns: {columns}
  max_seconds: 10.0   # of longer sounds the beginning is read; ignored by models of spectrograms, which have one size
"""

SPEECH_MODEL = """\
model:
  path: {model}   # Hub id or local folder
  task: {task}
  head: {head}   # keep: writes texts already; new: a head for the characters of the data (finetune must come first)
data:
  path: {data}   # Hub id, or a folder of csv, tsv, jsonl or parquet with a column of paths of WAV or FLAC files
  subset: {subset}   # configuration of the Hub data set; ignored for local files
  columns: {columns}   # the sound, and the text that is spoken
  max_seconds: 10.0   # of longer sounds the beginning is read
"""

TAIL = """\
goals:
  max_drop: {drop}
  min_speedup: {speedup}      # over torch (fp32, eager), at the worst shape below
target:
  device: cpu
  engines: {engines}
  batch_sizes: [1, 8]
{lengths}stages:
{finetune}{smaller}  - quantize: {{mode: ptq}}   # true int8, calibrated on training rows{modes}
{int4}  - export: {{}}              # ONNX with Q/DQ, engines, parity checks
{triton}"""
SMALLER = """\
  # - distill: {{student: {{layers: {layers}}}, loss: {loss}, epochs: 3}}   # a student with fewer layers
  # - prune: {{sparsity: 0.5}}   # remove half of the multiply-accumulates of the blocks, then recover by training
"""
INT4 = """\
  # - quantize: {scheme: w4a8-block, group_size: 32, symmetric: false, rounding: gptq, embeddings: true}   # instead: int4, for
  #   onnxruntime_decoder and models built like Llama; scheme: w4a16 for openvino_genai
"""
MODES = "; qat: trained in int8; auto: whatever max_drop requires"
TRITON = "  - triton_repo: {}         # Triton model repository, served and checked\n"
SCORING = "[openvino, onnxruntime]   # the fastest that meets the goals is served; add tensorrt for NVIDIA GPUs"
GENERATING = "[{engine}]   # answers prompts (compress generate); openvino and onnxruntime score text"
LENGTHS = {
    "text": "  sequence_lengths: [32, 128]\n",
    "questions": "  sequence_lengths: [128, 384]\n",
    "image": "",
    "towers": "  sequence_lengths: [16, 77]   # of texts; a SigLIP has only 64\n",
    "audio": "  sequence_lengths: [32000, 160000]   # samples\n",
}
"""Lengths of the target, by modality; of questions with windows of their contexts."""
DROPS = {True: "0.02        # perplexity may rise by 2 %", False: "0.01        # at most one point of the primary metric"}


def template(task: str, file: str) -> str:
    """Returns the text of a recipe for `task` that will be saved as `file`.

    Raises:
        InputError: The task is unknown.
    """
    if task not in TASKS:
        raise InputError(f"--task {task}", "unknown", f"allowed: {', '.join(TASKS)}{nearest(task, TASKS)}")
    row = TASKS[task]
    values = {**asdict(row.example), "task": task, "command": pasted("compress", "run", file)}
    generates = row.generates
    values["lengths"] = LENGTHS["questions" if row.finds_spans else "towers" if row.two_towers else row.modality]
    training = "{epochs: 3, learning_rate: 1.0e-3, schedule: cosine}" if generates else "{epochs: 3}"
    kept = "  # - finetune: {epochs: 3}   # trains on your labels first; with head: new it has to\n" if row.modality == "text" else ""
    values["finetune"] = f"  - finetune: {training}\n" if values["head"] == "new" else kept
    values["layers"], values["loss"] = ("2", "soft_target") if generates else ("3" if row.modality == "text" else "6", "minilm")
    values["smaller"], values["modes"] = ("", "") if row.two_towers else (SMALLER.format(**values), MODES)
    values["int4"] = INT4 if generates and not row.encoder_decoder else ""
    values["drop"] = DROPS[primary(task).relative]
    values["engines"] = SCORING.partition(";")[0] if row.two_towers else SCORING
    if generates:
        values["engines"] = GENERATING.format(engine=served_on("cpu", generates=True, encoder_decoder=row.encoder_decoder)[0])
    values["more"] = f"  {row.example.more}\n" if row.example.more else ""
    values["speedup"], values["triton"] = "2.0" if generates else "3.0", TRITON
    generating = TEXT_TO_TEXT_MODEL if row.encoder_decoder else GENERATION_MODEL
    of_text = generating if generates else SEARCH_MODEL if row.searches else QUESTION_MODEL if row.finds_spans else TEXT_MODEL
    of_images = TOWERS_MODEL if row.two_towers else IMAGE_MODEL
    body = {"image": of_images, "audio": SPEECH_MODEL if row.transcribes else AUDIO_MODEL}.get(row.modality, of_text)
    return (HEAD + body + TAIL).format(**values)


def write_template(task: str, output: Path) -> Path:
    """Writes a commented recipe for `task`.

    Raises:
        InputError: The task is unknown, or `output` exists.
    """
    return _write(template(task, str(output)), output)


def write_copy(recipe: str, output: Path) -> Path:
    """Writes a copy of a shipped recipe.

    Raises:
        InputError: The recipe is unknown, or `output` exists.
    """
    return _write(copy_of(recipe, str(output)), output)


def _write(text: str, output: Path) -> Path:
    output = local(output, "-o")
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InputError(f"{output}", "already exists", remedy="give another file with -o") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{output}", "its folder does not exist", remedy="create it, or give another file with -o") from error
    return output
