#!/usr/bin/env bash
# Transformers 5.23.0, torch 2.13.0: the attention mask does not hide padding in several encoders for text. The guess was that a classifier answers
# a text alike, alone and padded on the right with a mask of zeros, up to rounding, whatever its architecture.
#
# Seen (2026-11-30), random weights in evaluation mode, a text of 11 tokens alone and with 8 padded tokens behind it: the answers of BERT, RoBERTa,
# DeBERTa and BART change by less than 1e-5 of their largest logit. Others change by a thousandth (ConvBERT) or by whole percents: convolutions
# read the padding (ConvBERT, and Nystromformer over its values), hashes and pooling do (YOSO, CANINE, Funnel), and the head of XLNet reads the
# last position of the batch. Nothing warns. So in these models an answer depends on the other rows of its batch; padding to one fixed length
# is the way out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.23.0 numpy==2.4.6
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

SIZES = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, max_position_embeddings=40, type_vocab_size=2)
SIDES = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in dict(layers=2, attention_heads=4, ffn_dim=64).items()}
MODELS = {
    "bert": SIZES,
    "roberta": SIZES,
    "convbert": {**SIZES, "embedding_size": 32},
    "deberta-v2": {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "bart": {"d_model": 32, "max_position_embeddings": 40, **SIDES},
    "nystromformer": SIZES,
    "yoso": SIZES,
    "canine": {**SIZES, "downsampling_rate": 4, "num_hash_buckets": 64, "local_transformer_stride": 16},
    "funnel": dict(d_model=32, block_sizes=[2, 2], n_head=4, d_head=8, d_inner=64),
    "xlnet": dict(d_model=32, n_layer=3, n_head=4, d_inner=64),
}
HIDDEN = {"bert", "roberta", "deberta-v2", "bart"}
IDS = {"vocab_size": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
print(f"transformers {version('transformers')}, torch {torch.__version__}")
for name, keys in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(name, num_labels=2, **IDS, **keys)).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in weight_name:
                weight.mul_(3)  # so that logits have a size
        row = torch.randint(5, 60, (1, 11))
        row[0, -1] = 2
        alone = model(input_ids=row, attention_mask=torch.ones_like(row)).logits
        padded = torch.nn.functional.pad(row, (0, 8), value=1)
        mask = torch.nn.functional.pad(torch.ones_like(row), (0, 8))
        change = float((model(input_ids=padded, attention_mask=mask).logits - alone).abs().max() / alone.abs().max())
    print(f"{name:14} changes by {change:.1e} of its largest logit")
    assert change < 1e-5 if name in HIDDEN else change > (3e-4 if name == "convbert" else 5e-3), "the behaviour has changed"
PYTHON
