#!/usr/bin/env bash
# sentence-transformers 6.2.0, Transformers 5.23.0, compressed-tensors 0.20.0: an embedder stored in int8 by compressed-tensors loads in
# sentence-transformers and then cannot encode. The guess was that what AutoModel loads and runs, SentenceTransformer runs too, since it loads the
# model through AutoModel.
#
# Seen: the codes become floats in a hook before the first call of the model itself. AutoModel is called and gives the answers of the float grid.
# sentence-transformers calls the method `forward` of the model, the hook never runs, and the first Linear multiplies float32 by int8:
# "self and mat2 must have the same dtype, but got Float and Char". One call of the model beforehand, or dequantize=True when it is loaded, and
# encode works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq sentence-transformers==6.2.0 transformers==5.23.0 compressed-tensors==0.20.0 torch==2.13.0 tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON' 2> /dev/null
import sys
from pathlib import Path

import compressed_tensors
import numpy as np
import sentence_transformers
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1])
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()
weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
groups = {"linear": {"targets": ["Linear"], "weights": weights}}
apply_quantization_config(model, QuantizationConfig(config_groups=groups, format="int-quantized", quantization_status="frozen"))
for module in model.modules():
    if isinstance(module, torch.nn.Linear):
        module.weight_scale.data = module.weight.data.abs().amax(1, keepdim=True) / 127
ids = torch.tensor([[5, 6, 7]])
with torch.no_grad():
    expected = model(input_ids=ids).last_hidden_state
compressor = ModelCompressor.from_pretrained_model(model, quantization_format="int-quantized")
compressor.compress_model(model)
model.save_pretrained(folder)
compressor.update_config(str(folder))


def opened(**settings):
    return SentenceTransformer(modules=[Transformer(str(folder), **settings), Pooling(32)])


def encoded(embedder):
    try:
        return embedder.encode(["a b c"])[0]
    except RuntimeError as error:
        return str(error)


with torch.no_grad():
    apart = float((transformers.AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state - expected).abs().max())
called = opened()
with torch.no_grad():
    called[0].auto_model(input_ids=ids)
floats = opened(model_kwargs={"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)})
found = {"as loaded": encoded(opened()), "after one call of the model": encoded(called), "with dequantize=True": encoded(floats)}
versions = ", ".join(f"{one.__name__} {one.__version__}" for one in (sentence_transformers, transformers, compressed_tensors))
print(f"{versions}: AutoModel is {apart} away from the model that was stored")
for how, answer in found.items():
    print(f"{versions}, encode {how}: {answer if isinstance(answer, str) else 'a vector'}")
assert apart < 1e-5
assert found["as loaded"] == "self and mat2 must have the same dtype, but got Float and Char", "the behaviour has changed"
mean = expected[0].mean(0).numpy()
for how in ("after one call of the model", "with dequantize=True"):
    assert np.abs(found[how] - mean).max() < 1e-4, "the behaviour has changed"
PYTHON
