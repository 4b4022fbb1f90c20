#!/usr/bin/env bash
# mteb 2.26.24, sentence-transformers 6.2.0: the second model that is evaluated gets the scores of the first one, if neither has a name. The guess
# was that a model is evaluated when evaluate(model, tasks) is called, and that a cache of results tells models apart.
#
# Seen (2026-11-29): results are kept in ~/.cache/mteb by name and revision, by default, and a SentenceTransformer that is built from modules, or
# loaded from a local folder, is "no_model_name/available" in "no_revision_available". The first such model decides: an embedder of random numbers
# has the perfect score 1.0 of the model before it, where its own is 0.04. With cache=None each model is run. A name in model_card_data tells models apart.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq mteb==2.26.24 sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0 datasets==5.2.0 numpy==2.4.6
export HF_HOME="$folder/cache" MTEB_CACHE="$folder/mteb" HF_HUB_OFFLINE=1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import sys
from importlib.metadata import version

import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

GENERATOR = np.random.default_rng(0)
WORDS = [f"word{number}" for number in range(500)]
MEANING = GENERATOR.standard_normal((500, 32)).astype(np.float32)
PAIRS = GENERATOR.integers(0, 500, (300, 2, 4))


def likeness(table):
    first, second = (table[PAIRS[:, side]].mean(1) for side in (0, 1))
    return (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)


class Likeness(AbsTaskSTS):
    min_score, max_score = -1, 1
    metadata = TaskMetadata(
        name="Likeness", dataset={"path": "local/likeness", "revision": "1"}, description="Pairs of texts.", reference=None, type="STS",
        category="t2t", modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman",
        date=("2026-01-01", "2026-01-02"), domains=["Written"], task_subtypes=[], license="cc0-1.0", annotations_creators="derived",
        dialect=[], sample_creation="created", bibtex_citation="",
    )

    def load_data(self, **_):
        texts = [[" ".join(WORDS[word] for word in side) for side in pair] for pair in PAIRS]
        rows = {"sentence1": [pair[0] for pair in texts], "sentence2": [pair[1] for pair in texts], "score": likeness(MEANING).tolist()}
        self.dataset, self.data_loaded = DatasetDict(test=Dataset.from_dict(rows)), True


def embedder(table):
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table)], device="cpu")


def score(model, **settings):
    [result] = mteb.evaluate(model, Likeness(), show_progress_bar=False, **settings).task_results
    return float(result.get_score())


good, noise = embedder(MEANING), embedder(GENERATOR.standard_normal((500, 32)).astype(np.float32))
seen = {"good": score(good), "noise": score(noise), "noise, cache=None": score(noise, cache=None)}
for name, model in (("good", good), ("noise", noise)):
    model.save(f"{sys.argv[1]}/{name}")
    seen[f"{name}, from its folder"] = score(SentenceTransformer(f"{sys.argv[1]}/{name}", device="cpu"))
noise.model_card_data.model_name = "me/noise"
seen["noise, with a name"] = score(noise)
print(f"mteb {version('mteb')}:", {name: round(value, 3) for name, value in seen.items()})
assert seen["good"] > 0.99 and abs(seen["noise, cache=None"]) < 0.2 and seen["noise, with a name"] == seen["noise, cache=None"]
assert all(seen[name] == seen["good"] for name in ("noise", "good, from its folder", "noise, from its folder")), "the behaviour has changed"
PYTHON
