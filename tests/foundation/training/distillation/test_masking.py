"""Masked copies: which tokens are hidden, and that nothing but (seed, step, row) decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.distillation.masking import Augment, Masking, masking_of
from tests.problems import raises_problem
from tests.word_tokenizer import write_tokenizer

MASK, SHOWN = 4, (0, 1, 2, 3, 4)


def features(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 60, (rows, length))
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(rows, length, dtype=torch.int64)}


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.05, 0.95), st.integers(0, 1000), st.integers(0, 30))
def test_only_copies_change_and_only_to_the_mask(rows: int, length: int, probability: float, seed: int, originals: int) -> None:
    masking = Masking(probability, MASK, SHOWN, seed, originals)
    given_features, indices = features(rows, length, seed), np.random.default_rng(seed).integers(0, 60, rows)
    before = given_features["input_ids"].clone()
    ids = masking(given_features, indices, 5)["input_ids"]
    assert torch.equal(given_features["input_ids"], before)
    changed = ids != before
    assert (ids[changed] == MASK).all()
    assert not changed[torch.from_numpy(indices < originals)].any()
    assert not (changed & torch.isin(before, torch.tensor(SHOWN))).any()
    naive = before.clone()
    for row, index in enumerate(indices):
        drawn = np.random.default_rng([seed, 5, index]).random(length)
        for token in range(length):
            if index >= originals and drawn[token] < probability and int(before[row, token]) not in SHOWN:
                naive[row, token] = MASK
    assert torch.equal(ids, naive)


def test_neither_padding_nor_the_batch_matters_but_the_step_does() -> None:
    masking = Masking(0.3, MASK, SHOWN, 0, 0)
    whole = {"input_ids": torch.randint(5, 60, (6, 40))}
    indices = np.arange(10, 16)
    ids = masking(whole, indices, 2)["input_ids"]
    part = masking({"input_ids": whole["input_ids"][2:4, :24]}, indices[2:4], 2)["input_ids"]
    assert torch.equal(part, ids[2:4, :24])
    assert not torch.equal(masking(whole, indices, 3)["input_ids"], ids)
    assert 0.2 < float((ids == MASK).float().mean()) < 0.4


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Any) -> None:
    import json

    write_tokenizer(tmp_path, ["good", "bad"])
    found = masking_of(Augment(), tmp_path, 0, 7, "stages.distill.augment")
    assert (found.mask_id, set(found.special_ids), found.originals) == (4, {0, 1, 2, 3, 4}, 7)
    settings_file = tmp_path / "tokenizer_config.json"
    written = json.loads(settings_file.read_text())
    del written["mask_token"]
    settings_file.write_text(json.dumps(written))
    special = tmp_path / "special_tokens_map.json"
    if special.exists():
        special.write_text(json.dumps({name: value for name, value in json.loads(special.read_text()).items() if name != "mask_token"}))
    with raises_problem("stages.distill.augment", "given", "no mask token"):
        masking_of(Augment(), tmp_path, 0, 7, "stages.distill.augment")
