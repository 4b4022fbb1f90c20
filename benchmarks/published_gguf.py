"""GGUF files of `compress publish` in llama.cpp, against torch: codes, logits, perplexity, most likely tokens, vectors, token ids.

    python benchmarks/published_gguf.py RUN --variants baseline int8 int4 --python ENVIRONMENT/bin/python --data FOLDER

RUN is a finished run of a language model or of a text embedding model, ENVIRONMENT has `llama-cpp-python`, and FOLDER holds the data sets
wikitext2, multi30k and sst2. Each variant is published as the command line does it, and read by llama.cpp in a process of its own.

On a CPU llama.cpp rounds the inputs of its products: to int8 beside Q8_0, Q4_0 and Q4_1, in blocks of 32 with a scale each, and to
float16 beside F16. So torch answers twice, with the weights of the checkpoint: as it is, and with inputs that are rounded in the same way.
The second tells what the file itself changes. "Relative" is the norm of the difference of all logits over the norm of the logits.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from cli import app
from compress.run.opened import opened
from export.gguf.families import FAMILIES, row_order
from foundation.labels.tasks import TASKS
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.tables import load_tables, table_codes
from parts.llama_products import round_inputs

WORKER = Path(__file__).parent / "workers" / "llama_cpp_worker.py"
TEXTS = (("wikitext2/train.txt.gz", 700), ("multi30k/train.de.gz", 600), ("sst2/sentence_level_train.tsv.gz", 700))
PROMPT, TOKENS = 24, 32
HEADS = ("variant", "file", "MB", "codes equal", "texts with equal tokens")
DECODES = (
    "perplexity",
    "of torch",
    "of torch, inputs rounded",
    "relative to torch",
    "relative, inputs rounded",
    "most likely tokens equal",
)
EMBEDS = ("cosine to torch: lowest", "mean", "lowest, inputs rounded", "mean, inputs rounded")


def main() -> None:
    """Publishes every variant, lets llama.cpp answer, compares, prints a table."""
    arguments = parse()
    run = opened(arguments.run)
    embeds = TASKS[run.recipe["model"]["task"]].embeds_texts
    heads = (*HEADS, *(EMBEDS if embeds else DECODES))
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    sample = texts(arguments.data)
    for variant in arguments.variants:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            command = ["publish", str(run.folder), "--variant", variant, "--as", "gguf", str(out), "--license", "unknown"]
            with redirect_stdout(sys.stderr):
                app(command, standalone_mode=False)
            (file,) = out.glob("*.gguf")
            checkpoint = Checkpoint(run.variants[variant].path)
            cells = [variant, file.name, f"{file.stat().st_size / 1e6:.1f}", codes(checkpoint, file)]
            tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            request: dict[str, Any] = {"texts": sample}
            request |= {"embed": sample[-arguments.rows :]} if embeds else blocks(arguments, tokenizer)
            answer = ask(arguments.python, file, request)
            pairs = zip(sample, answer["ids"], strict=True)
            cells.append(f"{sum(tokenizer.encode(text).ids == ids for text, ids in pairs)} of {len(sample)}")
            compare = vectors if embeds else logits
            cells += compare(load_float(checkpoint.folder), file, request, answer, tokenizer)
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"llama-cpp-python {answer['version']}")


def texts(data: Path) -> list[str]:
    """Returns 2,000 real texts: lines of an encyclopedia, German captions, reviews."""
    found: list[str] = []
    for path, count in TEXTS:
        with gzip.open(data / path, "rt", encoding="utf-8") as lines:
            whole = (line.split("\t")[0].strip() for line in lines)
            found += itertools.islice((line for line in whole if len(line) > 20), count)
    return found


def blocks(arguments: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns blocks of token ids, and prompts of token ids, of an encyclopedia."""
    with gzip.open(arguments.data / "wikitext2" / "test.txt.gz", "rt", encoding="utf-8") as stream:
        ids = tokenizer.encode(stream.read(200_000), add_special_tokens=False).ids
    count, length = arguments.rows, arguments.length
    windows = [ids[start : start + length] for start in range(0, count * length, length)]
    prompts = [ids[start : start + PROMPT] for start in range(20_000, 20_000 + 400 * count, 400)]
    return {"windows": windows, "prompts": prompts, "tokens": TOKENS}


def ask(python: str, file: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers of llama.cpp, with `logits` float32 [N, T, V] where the request has windows."""
    places = [file.with_suffix(suffix) for suffix in (".request.json", ".answer.json", ".npy")]
    places[0].write_text(json.dumps(request), encoding="utf-8")
    subprocess.run([python, str(WORKER), str(file), *map(str, places)], check=True)
    answer: dict[str, Any] = json.loads(places[1].read_text(encoding="utf-8"))
    return answer | ({"logits": np.load(places[2])} if "windows" in request else {})


def codes(checkpoint: Checkpoint, file: Path) -> str:
    """Compares the integers in a file with the run's: matrices that hold exactly these, of all quantized ones of the run, by format."""
    if not checkpoint.is_quantized:
        return "float"
    layers, _ = load_quantization(checkpoint.folder)
    scales = {**layers, **load_tables(checkpoint.folder)}
    names, stored = tensor_names(checkpoint), {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    same: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for layer, scale in scales.items():
        tensor, weight = stored[names[f"{layer}.weight"]], checkpoint.weights[f"{layer}.weight"].float()
        order = row_order(checkpoint.config, f"{layer}.weight")
        code = table_codes(weight, scale) if isinstance(scale, Tensor) else scale.codes(weight)
        kind = tensor.tensor_type.name
        total[kind] += 1
        same[kind] += bool(np.array_equal(unpacked(tensor.data, kind), (code if order is None else code[order]).numpy()))
    return ", ".join(f"{same[kind]} of {count} {kind}" for kind, count in total.items())


def tensor_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the names in the file by the names in the checkpoint."""
    known = name_map(checkpoint.config)
    return {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in checkpoint.weights.names}


def name_map(config: Any) -> gguf.TensorNameMap:
    """Returns the names that llama.cpp has for the tensors of a model."""
    family = FAMILIES[config.model_type]
    (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def unpacked(data: np.ndarray, kind: str) -> np.ndarray | None:
    """Returns the integers of blocks, int8 [O, I]; None for floats. 4 bits are [-8, 7], as in the checkpoint."""
    if kind not in ("Q8_0", "Q4_0", "Q4_1"):
        return None
    head = 4 if kind == "Q4_1" else 2
    block_OBb = data.reshape(len(data), -1, head + (32 if kind == "Q8_0" else 16))[..., head:]
    if kind == "Q8_0":
        return block_OBb.view(np.int8).reshape(len(data), -1)
    halves = np.concatenate([block_OBb & 15, block_OBb >> 4], axis=2).astype(np.int8) - 8
    return halves.reshape(len(data), -1)


@contextmanager
def as_llama_cpp(model: nn.Module, file: Path, tokens: bool) -> Iterator[None]:
    """Rounds the inputs of all products as llama.cpp does beside the formats of a file."""
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    known = name_map(model.config)
    handles = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            name = known.get_name(f"{path}.weight", try_suffixes=(".weight",))
            name = "token_embd.weight" if tokens and path == "lm_head" and name not in stored else name
            if name in stored:
                handles.append(layer.register_forward_pre_hook(round_inputs(stored[name])))
    assert handles, "no layer of the model has a tensor in the file"
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits(model: Any, file: Path, request: dict[str, Any], answer: dict[str, Any], _: Tokenizer) -> list[str]:
    """Returns the cells of a language model."""
    theirs, ids = torch.from_numpy(answer["logits"]), torch.tensor(request["windows"])
    ours = answers(model, ids)
    with as_llama_cpp(model, file, tokens=True):
        rounded = answers(model, ids)
        equal, lead = most_likely(model, request, answer)
    cells = [f"{math.exp(loss(logit, ids)):.4f}" for logit in (theirs, ours, rounded)]
    cells += [f"{float((theirs - other).norm() / other.norm()):.2g}" for other in (ours, rounded)]
    return [*cells, f"{equal} of {TOKENS * len(request['prompts'])}" + (f", else torch's leads by at most {lead:.2g}" if lead else "")]


@torch.no_grad()
def answers(model: Any, ids: Tensor) -> Tensor:
    """Returns logits, float32 [N, T, V]."""
    return torch.cat([model(row[None]).logits.float() for row in ids])


def loss(logits: Tensor, ids: Tensor) -> float:
    """Returns the mean negative log-likelihood of the tokens after the first of each block, nats."""
    return sum(float(nn.functional.cross_entropy(logit[:-1].double(), row[1:])) for logit, row in zip(logits, ids, strict=True)) / len(ids)


@torch.no_grad()
def most_likely(model: Any, request: dict[str, Any], answer: dict[str, Any]) -> tuple[int, float]:
    """Returns how many tokens of llama.cpp are the most likely ones in torch after the same tokens, and the largest lead of another."""
    equal, lead = 0, 0.0
    for prompt, tokens in zip(request["prompts"], answer["greedy"], strict=True):
        logit_TV = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        equal += int((logit_TV.argmax(-1) == torch.tensor(tokens)).sum())
        theirs_T = logit_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        lead = max(lead, float((logit_TV.amax(-1) - theirs_T).max()))
    return equal, lead


def vectors(model: Any, file: Path, request: dict[str, Any], answer: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Returns the cells of an embedding model."""
    theirs = torch.tensor(answer["vectors"])
    ours = embedded(model, tokenizer, request["embed"])
    with as_llama_cpp(model, file, tokens=False):
        rounded = embedded(model, tokenizer, request["embed"])
    cosines = [nn.functional.cosine_similarity(theirs, other) for other in (ours, rounded)]
    return [f"{float(value):.6f}" for cosine in cosines for value in (cosine.min(), cosine.mean())]


@torch.no_grad()
def embedded(model: Any, tokenizer: Tokenizer, sample: list[str]) -> Tensor:
    """Returns vectors, float32 [N, D]."""
    found = []
    for text in sample:
        ids = torch.tensor([tokenizer.encode(text).ids])
        found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0])
    return torch.stack(found)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--variants", nargs="+", required=True, help="ids of its variants")
    parser.add_argument("--python", required=True, help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--rows", type=int, default=8, help="blocks and prompts, or texts whose vectors are compared")
    parser.add_argument("--length", type=int, default=128, help="tokens of a block")
    return parser.parse_args()


if __name__ == "__main__":
    main()
