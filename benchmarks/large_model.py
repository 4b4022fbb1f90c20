"""Memory of quantizing a language model that is larger than memory should be asked to hold: growth of RssAnon against its limit.

    python benchmarks/large_model.py [--billions 3] [--layers 2] [--methods nearest minmax smoothquant gptq] [--rows 16] [--tokens 128]

Writes a Llama of random bfloat16 weights, shard by shard, and quantizes it with `stream: true` in a child process for each method:

    nearest        w4a16, rounding to nearest: no rows
    minmax         w8a8, min-max ranges, no smoothing
    smoothquant    w8a8, alpha 0.5
    gptq           w4a16, GPTQ

RssAnon of /proc/PID/status is what a process holds that is no file; it is read every 10 ms, from the end of the child's imports on. The
limit of its growth:

    1.5 x the largest unit as it is stored (decoder layer, embedding or head) + hidden states of all rows, float32
    gptq: + three float32 matrices of the widest input

The child has RLIMIT_DATA (private writable memory, imports included) set to `--ceiling` times the size of the model files, so that a model
that was loaded, in whatever type, would end it. The folder is removed at the end. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HEAD_WIDTH = 64
VOCABULARY = 32000
SECONDS_BETWEEN = 0.01
METHODS: dict[str, dict[str, Any]] = {
    "nearest": {"scheme": "w4a16", "group_range": "weights"},
    "minmax": {"scheme": "w8a8", "smoothquant": False, "calibration": {"method": "minmax"}},
    "smoothquant": {"scheme": "w8a8", "smoothquant": {"alpha": 0.5}},
    "gptq": {"scheme": "w4a16", "rounding": "gptq"},
}
MIB = 2**20
COLUMNS = (
    *("method", "parameters, billions", "model files", "largest unit", "hidden states", "H", "limit", "growth of RssAnon", "met"),
    *("RLIMIT_DATA", "seconds"),
)


def sizes_of(parameters: float) -> dict[str, int]:
    """Returns a shape with about so many parameters: 64 times as wide as deep in round numbers, as Llama has it, or nearly."""
    shapes = []
    for heads in range(4, 128, 2):
        width = heads * HEAD_WIDTH
        inner = (width * 27 // 10) // 128 * 128
        layers = max(1, round((parameters - 2 * VOCABULARY * width) / (4 * width**2 + 3 * width * inner)))
        total = layers * (4 * width**2 + 3 * width * inner) + 2 * VOCABULARY * width
        shapes.append((abs(width / layers - 110) + 1000 * abs(total / parameters - 1), width, inner, layers, heads))
    _, width, inner, layers, heads = min(shapes)
    return {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}


def write_model(folder: Path, sizes: dict[str, int], vocabulary: int = VOCABULARY) -> None:
    """Writes a Llama of random bfloat16 weights with a tokenizer that knows two words; no more than a tensor is in memory."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig

    from foundation.artifacts.shards import ShardWriter
    from foundation.models.streaming import meta_model

    config = LlamaConfig(**sizes, vocab_size=vocabulary, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], use_cache=False)
    model, _ = meta_model(config)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    writer = ShardWriter(folder, model.state_dict())
    for name, value in model.state_dict().items():
        tensor = writer.new(name, value.shape, torch.bfloat16)
        if value.dim() == 1:
            tensor.fill_(1)
        for part in tensor.split(1024) if value.dim() == 2 else []:
            part.normal_(0, 0.02, generator=generator)
    writer.close()


def quantize_here(folder: Path, out: Path, method: str, rows: int, tokens: int, ceiling: int, threads: int) -> None:
    """What the child does: imports, says where it starts from, quantizes, says what its units are."""
    import numpy as np
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # what is imported on first use is no growth

    from foundation.artifacts.artifact import Artifact
    from foundation.core.progress import ConsoleProgress
    from foundation.core.target import Target
    from foundation.data.splits import Data, Split
    from foundation.labels.next_token import labels_of
    from foundation.stage.context import Context
    from quantize.quantize import Quantize

    torch.set_num_threads(threads)
    random = np.random.default_rng(0)
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    blocks = [random.integers(0, vocabulary, tokens).astype(np.int32) for _ in range(rows)]
    split = Split(list(blocks), labels_of(blocks, tokens - 1))
    data = Data(split, split, split, ())
    stage = Quantize(stream=True, **{**METHODS[method], "calibration": {"rows": rows, **METHODS[method].get("calibration", {})}})
    context = Context("text-generation", data, tokens, Target(sequence_lengths=(tokens,)), 0, ConsoleProgress("quiet"), out / "scratch")
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
    print(json.dumps({"base": anonymous("self")}), flush=True)
    figures = stage.run(Artifact(folder, {}), context, out)
    print(json.dumps(figures["streamed"]), flush=True)


def anonymous(process: int | str) -> int:
    """Returns RssAnon of a process in bytes; 0 once it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def measure(folder: Path, method: str, rows: int, tokens: int, ceiling: int, threads: int) -> dict[str, Any]:
    """Quantizes in a child; returns its base, its peak, the bytes of the largest unit and of all hidden states, and its seconds."""
    out = folder.with_name(f"{folder.name}-{method}")
    out.mkdir()
    sizes = [str(value) for value in (rows, tokens, ceiling, threads)]
    command = [sys.executable, __file__, "--child", str(folder), str(out), method, *sizes]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            found, started, peak = json.loads(child.stdout.readline() or "{}"), time.monotonic(), 0
            while child.poll() is None:
                peak = max(peak, anonymous(child.pid))
                time.sleep(SECONDS_BETWEEN)
            told = child.stdout.read()
        if child.returncode:
            raise SystemExit(f"{method}: the child ended with status {child.returncode}")
        return {**found, **json.loads(told), "peak": peak, "seconds": time.monotonic() - started}
    finally:
        shutil.rmtree(out)


def limit_of(method: str, found: dict[str, Any], widest: int) -> float:
    """Returns how many bytes RssAnon may grow by."""
    return 1.5 * float(found["unit_bytes"]) + float(found["hidden_bytes"]) + matrices_of(method, widest)


def matrices_of(method: str, widest: int) -> int:
    """Returns the bytes of the three matrices that GPTQ may have, for its widest input."""
    return 3 * 4 * widest**2 if method == "gptq" else 0


def row_of(method: str, parameters: int, stored: int, widest: int, ceiling: int, found: dict[str, Any]) -> str:
    """Returns a row of the table."""
    matrices, limit, growth = matrices_of(method, widest), limit_of(method, found, widest), found["peak"] - found["base"]
    columns = [stored, found["unit_bytes"], found["hidden_bytes"], matrices, limit, growth]
    figures = " | ".join(f"{value / MIB:,.0f}" for value in columns)
    rest = f"{'yes' if growth <= limit else 'no'} | {ceiling / MIB:,.0f} | {found['seconds']:.0f}"
    return f"| {method} | {parameters / 1e9:.2f} | {figures} | {rest} |"


def main() -> None:
    """Writes the model, quantizes it by every method, prints the table."""
    if sys.argv[1:2] == ["--child"]:
        folder, out, method, *sizes = sys.argv[2:]
        quantize_here(Path(folder), Path(out), method, *(int(size) for size in sizes))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=3, help="parameters, in billions")
    parser.add_argument("--layers", type=int, help="decoder layers, where fewer or more of that width are wanted")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="how to quantize")
    parser.add_argument("--rows", type=int, default=16, help="calibration rows")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row")
    parser.add_argument("--ceiling", type=float, default=0.5, help="RLIMIT_DATA of the child, as a fraction of the model files")
    parser.add_argument("--threads", type=int, default=2, help="threads of the child")
    parser.add_argument("--out", type=Path, help="folder for the model; a temporary one where absent")
    arguments = parser.parse_args()
    sizes = sizes_of(arguments.billions * 1e9)
    sizes["num_hidden_layers"] = arguments.layers or sizes["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="large-model-", dir=arguments.out) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write_model(folder, sizes)
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        ceiling = int(arguments.ceiling * stored)
        print(f"{sizes}, {len(list(folder.glob('*.safetensors')))} shards; {arguments.rows} rows of {arguments.tokens} tokens; MiB\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        for method in arguments.methods:
            found = measure(folder, method, arguments.rows, arguments.tokens, ceiling, arguments.threads)
            print(row_of(method, stored // 2, stored, sizes["intermediate_size"], ceiling, found), flush=True)


if __name__ == "__main__":
    main()
