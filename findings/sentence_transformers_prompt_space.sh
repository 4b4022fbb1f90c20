#!/usr/bin/env bash
# sentence-transformers 6.2.0: a model that leaves its prompt out of the pooling also leaves out the first word of the text, if its tokenizer is
# a byte-level BPE (Qwen, ModernBERT, GPT-2) and the prompt ends with a space. The guess was that the prompt's tokens are left out, no more.
#
# Seen (2026-11-27): the prompt "query: " alone is three tokens: "query", ":" and the space. In "query: cat" the space is part of the token
# " cat", so the three tokens left out are the whole input: "cat" and "dog" get vectors of zeros, and of "cat and dog" the mean is over
# " and dog". Nothing warns. With the prompt "query:" and a text that starts with the space, every word counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq sentence-transformers==6.2.0 transformers==5.23.0 tokenizers==0.23.3 torch==2.13.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys

import numpy as np
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

folder = sys.argv[1]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
bpe.train_from_iterator(["query: cat", "query: dog", "query: cat and dog"] * 5, trainer)
PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>").save_pretrained(folder)
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
LlamaModel(LlamaConfig(vocab_size=len(bpe.get_vocab()), **sizes)).save_pretrained(folder)

transformer = Transformer(folder)
model = SentenceTransformer(modules=[transformer, Pooling(16, "mean", include_prompt=False)])


def tokens(text: str) -> list[str]:
    return [bpe.decode([token]) for token in transformer.tokenizer(text)["input_ids"]]


def mean(text: str, left_out: int) -> np.ndarray:
    """Mean of a text's last hidden states without the first ones."""
    ids = transformer.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return transformer.model(input_ids=ids).last_hidden_state[0, left_out:].mean(0).numpy()


print(f"sentence-transformers {sentence_transformers.__version__}: tokens of the prompt: {tokens('query: ')}")
print(f"tokens of the prompt and a text: {tokens('query: cat and dog')}")
cat, dog, both = model.encode(["cat", "dog", "cat and dog"], prompt="query: ")
print(f"largest element of the vectors of 'cat' and 'dog': {np.abs(cat).max()}, {np.abs(dog).max()}")
print(f"'cat and dog' is the mean from ' and' on: {np.allclose(both, mean('query: cat and dog', 3), atol=1e-5)}")
right = model.encode(" cat and dog", prompt="query:")
print(f"with the space in the text, the mean from ' cat' on: {np.allclose(right, mean('query: cat and dog', 2), atol=1e-5)}")
assert np.allclose(right, mean("query: cat and dog", 2), atol=1e-5)
assert not cat.any() and not dog.any() and np.allclose(both, mean("query: cat and dog", 3), atol=1e-5), "the behaviour has changed"
PYTHON
