#!/usr/bin/env bash
# whisper-normalizer 0.1.15 and Transformers 5.23.0, jiwer 4.0.0: under the English normalizer of Whisper, by which word error rates of speech models are
# published, transcripts with wrong numbers have an error rate of 0.
# The guess was that a normalizer brings two spellings of one number together, and keeps two numbers apart.
#
# Seen (2026-11-30): digits that follow each other are put together whatever they say. "Gate four five" and "gate forty five" are both 45, "one oh five"
# is "one hundred five", "three thirty" is 330, and "one thousand nineteen hundred" is 2900. A sign in front of digits is dropped, -5 is 5,
# while "minus five" is -5 and so an error for "-5". Thousands are cut: 10.000 is 10, and 12 000 is "12 0". 5.1 is "5 one". "Oh" is 0 in any
# sentence. What stands between < and > or in brackets is gone, as in "if a < b and c > d". Each pair is an error for jiwer alone.
# Numbers that are written in one way, and "twenty five" for 25, are right. huggingface/open_asr_leaderboard#66 has "CO 2", which becomes "C 02".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile whisper-normalizer==0.1.15 transformers==5.23.0 jiwer==4.0.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import jiwer
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer as OfTransformers
from whisper_normalizer.english import EnglishTextNormalizer

normalized, of_transformers = EnglishTextNormalizer(), OfTransformers({})
wrong = [
    ("the flight leaves from gate forty five", "the flight leaves from gate four five"),
    ("meet me in room one hundred five", "meet me in room one oh five"),
    ("take bus three hundred thirty", "take bus three thirty"),
    ("we sold two thousand nine hundred", "we sold one thousand nineteen hundred"),
    ("it was -5 degrees last night", "it was 5 degrees last night"),
    ("the house costs 10.000 euros", "the house costs 10 euros"),
    ("there were 12 000 people", "there were 12 0 people"),
    ("version 5.1 is out", "version 5 1 is out"),
    ("oh yes", "zero yes"),
    ("stop if a < b and c > d", "stop if a d"),
    ("press the left (not the right) button", "press the left button"),
]
same = [("it was -5 degrees last night", "it was minus five degrees last night"), ("the train leaves at 5:30", "the train leaves at five thirty")]
sound = [("it costs 25 dollars", "it costs twenty five dollars"), ("it costs $25", "it costs 25 dollars"), ("in 1999", "in nineteen ninety nine")]
print(f"whisper-normalizer {version('whisper-normalizer')}, transformers {version('transformers')}, jiwer {version('jiwer')}")
changed = "the behaviour has changed"
for true, heard in wrong + same + sound:
    left, right = normalized(true), normalized(heard)
    plain, rate = jiwer.wer(true, heard), jiwer.wer(left, right)
    print(f"{true!r}, heard as {heard!r}: error rate {plain:.2f}, normalized {rate:.2f} ({left!r}, {right!r})")
    assert plain > 0 and (of_transformers(true) == of_transformers(heard)) == (rate == 0)
    assert (rate > 0) == ((true, heard) in same), changed
PYTHON
