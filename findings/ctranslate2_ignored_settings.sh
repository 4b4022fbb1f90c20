#!/usr/bin/env bash
# CTranslate2 4.8.5, Transformers 5.23.0: the converter drops settings that it does not compute, and writes a model with other answers. The guess
# was that it refuses what it cannot compute, as it refuses a Llama with YaRN.
#
# Seen (2026-11-28): Gemma 2 loses the cap of its attention scores, its window and its scale of queries (27B has another scale than the root of the
# head's size), Gemma 3 the factor 8 of its rotary embedding (4B to 27B) and its scale of queries (27B), Qwen2 its window. All convert and run in
# float32, and nothing warns. The cap, the scale and the factor change every text of more than a token, a window the texts that are longer.
# A Llama, and the same models without the setting, give the logits of Transformers to five digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.23.0 ctranslate2==4.8.5
OMP_NUM_THREADS=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters.transformers import TransformersConverter
from tokenizers import Tokenizer, models

transformers.utils.logging.disable_progress_bar()
WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"word{place}": place for place in range(4, 64)}
IDS = np.random.default_rng(0).integers(4, 64, 24).tolist()
SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
GEMMA2 = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 16}
GEMMA3 = {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
LOCAL, FULL = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e6}
EIGHTH = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
CASES = (
    ("Llama", {}, False),
    ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}}, None),
    ("Gemma2", GEMMA2, False),
    ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 5.0}, True),
    ("Gemma2", GEMMA2 | {"sliding_window": 8}, True),
    ("Gemma2", GEMMA2 | {"query_pre_attn_scalar": 18}, True),
    ("Gemma3Text", GEMMA3 | {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": FULL}}, False),
    ("Gemma3Text", GEMMA3 | {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": EIGHTH}}, True),
    ("Gemma3Text", GEMMA3 | {"query_pre_attn_scalar": 21}, True),
    ("Qwen2", {}, False),
    ("Qwen2", WINDOW, True),
)


class Converter(TransformersConverter):
    def load_tokenizer(self, tokenizer_class, model_name_or_path, **settings):
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="<unk>")), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )


def error(name, settings, folder):
    """Largest difference of the logits, as a share of the largest logit."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    Converter(folder).convert(f"{folder}/converted")
    generator = ctranslate2.Generator(f"{folder}/converted", compute_type="float32", intra_threads=1)
    with torch.no_grad():
        right = model(torch.tensor([IDS])).logits[0].numpy()
    return float(np.abs(np.array(generator.forward_batch([IDS]))[0] - right).max() / np.abs(right).max())


print(f"CTranslate2 {ctranslate2.__version__}, transformers {transformers.__version__}")
for place, (name, settings, wrong) in enumerate(CASES):
    try:
        seen = error(name, settings, f"{sys.argv[1]}/{place}")
    except NotImplementedError as refusal:
        print(f"{name} {settings}: {str(refusal).partition('.')[0]}")
        assert wrong is None, "the behaviour has changed"
        continue
    print(f"{name} {settings}: logits off by {seen:.2%}")
    assert wrong is not None and (seen > 0.005 if wrong else seen < 1e-5), "the behaviour has changed"
PYTHON
