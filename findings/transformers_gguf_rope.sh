#!/usr/bin/env bash
# Transformers 5.23.0, gguf 0.19.0: from_pretrained(gguf_file=...) drops what a GGUF file says about rotary embeddings. The guess was that a file
# gives the model that was converted, or is refused: its scaling stands in the keys and tensors that llama.cpp writes and reads.
#
# Seen (2026-11-28): `rope.scaling.*` is read for gpt-oss alone, the tensor rope_freqs.weight (Llama 3.1 and 3.2) for no model, and rope.freq_base
# not for StarCoder 2. Llama with linear or Llama 3 scaling, Qwen2 with YaRN, the full attention of Gemma 3 from 4B on (factor 8) and StarCoder 2
# load as models with other frequencies. Their logits are off by 6 to 156 % on 48 tokens; the same files without scaling give the logits of the
# model to five digits. The log names the keys at level INFO alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON' 2> /dev/null
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (1, 48)))
SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
LOCAL, FULL = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}


def gemma3(full):
    return {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": full}, "head_dim": 256, "num_hidden_layers": 6}


CASES = (
    ("Llama", "llama", {"rope_parameters": LOCAL}, False),
    ("Llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, True),
    ("Llama", "llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 1024}}, True),
    ("Qwen2", "qwen2", {"rope_parameters": LOCAL}, False),
    ("Qwen2", "qwen2", {"rope_parameters": YARN}, True),
    ("Gemma3Text", "gemma3", gemma3(FULL), False),
    ("Gemma3Text", "gemma3", gemma3({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}), True),
    ("Starcoder2", "starcoder2", {"rope_parameters": LOCAL}, False),
    ("Starcoder2", "starcoder2", {"rope_parameters": FULL}, True),
)


def stored(name, tensor, architecture, config):
    """A tensor as llama.cpp's converter stores it: the rows of Llama's q and k in pairs, norms of Gemma with 1 added."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if architecture == "llama" and name.split(".")[-2] in heads:
        count = heads[name.split(".")[-2]]
        return tensor.reshape(count, 2, -1, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture == "gemma3" and "norm" in name else tensor


def write(model, architecture, path):
    config = model.config
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{place}" for place in range(config.vocab_size)])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, head, 2) / head)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    [kind] = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored(name, tensor.numpy(), architecture, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def error(name, architecture, settings, folder):
    """Largest difference of the logits, as a share of the largest logit."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "num_hidden_layers": 2} | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    folder.mkdir()
    write(model.eval(), architecture, folder / "model.gguf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        right, seen = model(IDS).logits, loaded(IDS).logits
    return float((seen - right).abs().max() / right.abs().max())


print(f"transformers {version('transformers')}, gguf {version('gguf')}")
for place, (name, architecture, settings, wrong) in enumerate(CASES):
    seen = error(name, architecture, settings, Path(sys.argv[1]) / str(place))
    print(f"{name} {settings['rope_parameters']}: logits off by {seen:.2%}")
    assert seen > 0.01 if wrong else seen < 1e-5, "the behaviour has changed"
PYTHON
