"""Made-up queries, documents and candidates in the layout of BEIR, and a tiny model that gives pairs of texts a score."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers import BertConfig, BertForSequenceClassification

from tests.export import sentiment

Judged = Mapping[tuple[str, str], object]


def write(out: Path, queries: Mapping[str, str], documents: Mapping[str, str], **qrels: Judged) -> Path:
    """Writes a folder; `qrels` maps the ids of query and document of each split to a score."""
    (out / "qrels").mkdir(parents=True, exist_ok=True)
    lines(out / "queries.jsonl", ({"_id": name, "text": text, "metadata": {}} for name, text in queries.items()))
    lines(out / "corpus.jsonl", ({"_id": name, "title": "", "text": text} for name, text in documents.items()))
    for split, judged in qrels.items():
        rows = "".join(f"{query}\t{document}\t{score}\n" for (query, document), score in judged.items())
        (out / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return out


def lines(path: Path, rows: Iterable[object]) -> None:
    """Writes one JSON value a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder(out: Path, train: int = 0, dev: int = 0, test: int = 40, documents: int = 120) -> Path:
    """Writes queries and documents: a query is relevant to the document with the same number, and half as much to the next one."""
    texts = list(dict.fromkeys(sentiment.rows(3 * (train + dev + test + documents))))
    asked = train + dev + test
    assert len(texts) >= asked + documents, len(texts)
    queries = {f"q{number}": texts[number] for number in range(asked)}
    corpus = {f"d{number}": texts[asked + number] for number in range(documents)}
    ends = {"train": (0, train), "dev": (train, train + dev), "test": (train + dev, asked)}
    qrels = {
        split: {
            (f"q{number}", f"d{(number + step) % documents}"): score for number in range(start, end) for step, score in enumerate((2, 1, 0))
        }
        for split, (start, end) in ends.items()
        if end > start
    }
    for split, (start, end) in ends.items():  # eight candidates of each query, the relevant ones in the middle
        rows = [f"q{number}\td{(number + step) % documents}\t{1 / (9 + step)}\n" for number in range(start, end) for step in range(-3, 5)]
        if rows:
            (out / "candidates").mkdir(parents=True, exist_ok=True)
            (out / "candidates" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return write(out, queries, corpus, **qrels)


def cross_encoder(out: Path, layers: int = 1) -> Path:
    """Writes a tiny model of random weights with one output."""
    shutil.copytree(sentiment.checkpoint(), out, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    config = BertConfig(
        vocab_size=len(sentiment.SPECIALS + sentiment.WORDS), hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=sentiment.LENGTH, num_labels=1,
    )  # fmt: skip
    sentiment.drawn(BertForSequenceClassification, config).save_pretrained(out)
    return out
