#!/usr/bin/env bash
# kitoken 0.11.1 (a tokenizer in Rust that reads tokenizer.json) against tokenizers 0.23.3: the rules about the spaces between words are read and not carried
# out.
# The guess was one sequence of ids for one file, or a refusal, as for CharDelimiterSplit and for the normalizer Strip.
#
# Seen (2026-11-30): WhitespaceSplit keeps the spaces that it is to remove. In a BPE or Unigram each of them is an [UNK], in a WordPiece everything behind
# the first space is, word for word, so that a sentence of ten words has one known token. lstrip and rstrip of an added token are skipped: in front
# of the <mask> of RoBERTa, and of every model made like it, stands a token for a space that the model never saw there. single_word is skipped as
# well, "na" is cut out of "naive". The normalizer Nmt keeps tabs. from_tokenizers succeeds, and nothing warns. Byte-level BPE, with NFKC and behind the
# five kinds of Split too, BERT, Metaspace, the Whitespace of the guides, and WhitespaceSplit in front of Metaspace, as T5 has it, give the same
# ids for all texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile tokenizers==0.23.3 kitoken==0.11.1
"$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

from kitoken import Kitoken
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordPiece

TEXTS = [
    "the café in Zürich is a naïve idea, what?! 12,345 and 3.14",
    "wait... the naive résumé",
    "  two  spaces\n\nlines\tand tokyo",
    "a <mask> idea",
]
SPECIAL = ["[UNK]", "[CLS]", "[SEP]"]
WORDS, BYTES = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)


def trained(model, splits, normalizer=None, added=()):
    """A tokenizer that has learned the texts themselves, so that every letter has an id."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splits
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    options = {"special_tokens": SPECIAL, "show_progress": False, "vocab_size": 400}
    if isinstance(model, BPE):
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in repr(splits) else [], **options)
    else:
        trainer = trainers.WordPieceTrainer(**options) if isinstance(model, WordPiece) else trainers.UnigramTrainer(unk_token="[UNK]", **options)
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def split(behavior):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(" ", behavior), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


bert = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
differ = {
    "WhitespaceSplit, BPE": trained(BPE(unk_token="[UNK]"), WORDS),
    "WhitespaceSplit, WordPiece": trained(WordPiece(unk_token="[UNK]"), WORDS),
    "WhitespaceSplit, Unigram": trained(Unigram(), WORDS),
    "lstrip": trained(BPE(), BYTES, added=[AddedToken("<mask>", lstrip=True)]),
    "rstrip": trained(BPE(), BYTES, added=[AddedToken("<mask>", rstrip=True)]),
    "single_word": trained(WordPiece(unk_token="[UNK]"), bert[1], bert[0], [AddedToken("na", single_word=True)]),
    "Nmt": trained(BPE(), BYTES, normalizers.Nmt()),
}
agree = {
    "ByteLevel": trained(BPE(), BYTES),
    "ByteLevel, NFKC": trained(BPE(), BYTES, normalizers.NFKC()),
    "<mask> without lstrip": trained(BPE(), BYTES, added=[AddedToken("<mask>")]),
    "BERT": trained(WordPiece(unk_token="[UNK]"), bert[1], bert[0]),
    "Whitespace": trained(BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace()),
    "Metaspace": trained(Unigram(), pre_tokenizers.Metaspace()),
    "WhitespaceSplit, Metaspace": trained(Unigram(), pre_tokenizers.Sequence([WORDS, pre_tokenizers.Metaspace()])),
} | {f"Split, {behavior}": trained(BPE(), split(behavior)) for behavior in ("removed", "isolated", "merged_with_next", "merged_with_previous", "contiguous")}
print(f"kitoken {version('kitoken')}, tokenizers {version('tokenizers')}")
for name, tokenizer in (differ | agree).items():
    other = Kitoken.from_tokenizers(tokenizer.to_str().encode())
    pairs = [(tokenizer.encode(text, add_special_tokens=False).tokens, [tokenizer.id_to_token(one) for one in other.encode(text, True)]) for text in TEXTS]
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    print(f"{name}: {len(wrong)} of {len(TEXTS)} texts differ" + (f", {wrong[-1][1][:8]} for {wrong[-1][0][:8]}" if wrong else ""))
    assert bool(wrong) == (name in differ), f"the behaviour has changed: {name}"
PYTHON
