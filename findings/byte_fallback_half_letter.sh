#!/usr/bin/env bash
# tokenizers 0.23.3: with byte fallback (Llama, Gemma, Mistral) one byte of an unfinished letter spoils the whole letters before it. The guess
# was that decoding shows U+FFFD for the unfinished letter alone, as UTF-8 decoders and byte-level BPE do.
#
# Seen: the bytes of a letter of three bytes decode to that letter. With the first byte of a second letter behind them, all four bytes decode
# to U+FFFD each: the decoder turns a run of byte tokens into text as a whole, or not at all. So text that was sent is no prefix of the text of
# one token more, and an answer that is cut within a letter loses every letter of the run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = "\u65e5\u672c"  # three bytes each
cut = list(letters.encode())[:4]

fallback = Tokenizer(models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True))
fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
byte_level = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
byte_level.decoder = decoders.ByteLevel()

seen = {
    "utf-8": bytes(cut).decode(errors="replace"),
    "byte-level": byte_level.decode(byte_level.encode(letters).ids[:4]),
    "byte fallback": fallback.decode(cut),
}
for name, text in seen.items():
    print(f"tokenizers {tokenizers.__version__}, four of six bytes, {name}: {text.encode('unicode_escape').decode()}")
assert fallback.decode(list(letters.encode())) == letters
assert seen["utf-8"] == seen["byte-level"] == letters[0] + "\ufffd"
assert seen["byte fallback"] == 4 * "\ufffd", "the behaviour has changed"
PYTHON
