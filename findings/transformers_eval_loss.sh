#!/usr/bin/env bash
# Transformers 5.23.0, torch 2.13.0: the eval_loss of one model on one set of texts depends on per_device_eval_batch_size, and batches whose loss is no
# number are left out. The guesses were the mean over all tokens, as the training loss of Trainer is since num_items_in_batch, and NaN for a model
# that answers NaN.
#
# Seen (2026-11-29): the mean of a batch over its tokens counts once for each of its rows, so that a row of 4 tokens in a batch of its own weighs as
# much as one of 32. A language model that knows the long texts has an eval_loss of 5.70 row by row and of 1.01 in batches of 64, a perplexity of 298
# or of 2.7. And logging_nan_inf_filter, on by default, drops batches that are NaN or infinite as long as one is left: a float16 copy that
# overflows on 56 of 64 rows has an eval_loss of 0.0004, its float32 original 0.25. In
# batches of 8 it is NaN. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import copy
import math
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
LENGTH, LOUD = 32, 9
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)


def padded(tokens):
    """A row of a fixed length whose padding has no label, as collators make it."""
    rest = LENGTH - len(tokens)
    return {"input_ids": tokens + [0] * rest, "attention_mask": [1] * len(tokens) + [0] * rest, "labels": tokens + [-100] * rest}


def evaluate(model, rows, batch):
    settings = TrainingArguments(sys.argv[1], per_device_eval_batch_size=batch, use_cpu=True, report_to="none", disable_tqdm=True)
    return Trainer(model, settings, eval_dataset=rows).evaluate()["eval_loss"]


def token_mean(model, rows):
    columns = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        logits = model(input_ids=columns["input_ids"], attention_mask=columns["attention_mask"]).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), columns["labels"][:, 1:].flatten()).item()


model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).eval()
easy = [7] * LENGTH
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(40):
    model(input_ids=torch.tensor([easy]), labels=torch.tensor([easy])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
short = torch.randint(10, 64, (32, 4)).tolist()
rows = [padded(tokens) for pair in zip(short, [easy] * 32, strict=True) for tokens in pair]
print(f"transformers {version('transformers')}")
right = token_mean(model, rows)
losses = {batch: evaluate(model, rows, batch) for batch in (1, 4, 64)}
print(f"64 rows, short and hard or long and easy: mean over the tokens {right:.3f}; eval_loss by batch size:", losses)
assert abs(losses[64] - right) < 1e-3 and losses[1] > 5 * right, "the behaviour has changed"

# A token with large activations: float16 has none above 65,504.
model.model.embed_tokens.weight.data[LOUD] = 1e5
rows = [padded([LOUD if place % 8 else 7] + [7] * (LENGTH - 1)) for place in range(64)]
half = copy.deepcopy(model).half()
whole, broken = evaluate(model, rows, 1), sum(math.isnan(token_mean(half, [row])) for row in rows)
halves = {batch: evaluate(half, rows, batch) for batch in (1, 8)}
print(f"float32: eval_loss {whole:.3f}; float16, where {broken} of 64 rows are NaN: eval_loss by batch size", halves)
assert broken == 56 and halves[1] < whole and math.isnan(halves[8]), "the behaviour has changed"
PYTHON
