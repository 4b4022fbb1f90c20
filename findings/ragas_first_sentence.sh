#!/usr/bin/env bash
# ragas 0.4.3, sacrebleu 2.6.0: BleuScore scores the first sentence of a response alone, against any sentence of the reference. ToolCallAccuracy has a
# penalty for missing calls that is never reached, and it compares calls in any order by their place.
# The guesses were the BLEU of the two texts, or of their sentences in pairs, and the docstring of ToolCallAccuracy: "proportional penalty" for fewer calls
# than expected, so that nine of ten score about 0.8, and "any order" with strict_order=False.
#
# Seen (2026-12-01): BleuScore splits both texts at ". " and passes [[sentence], [sentence], ...] to corpus_bleu, which are several references of one
# sentence each. sacrebleu stops at the end of the shortest list, and drops the other sentences of the response (vibrantlabsai/ragas#2888, open). A response
# of one right sentence and two about bananas scores 1.0, where the BLEU of the texts is 0.30. The last sentence of the reference alone has 1.0 (0.04). A
# complete answer behind "Sure, here is the answer to your question." has 0.06 (0.70). BleuScore of ragas.metrics.collections is the same, CHRFScore is right.
# ToolCallAccuracy: nine of ten calls score 0, and so does a second try, since lists of different length count as lists in another order; the penalty is
# computed and multiplied by 0 (ragas#2582, open). The warning is that "only the first 9 tool calls will be compared". strict_order=False sorts both lists by
# arguments and compares place by place: of the calls 2 and 3 for 1 and 2 none is right, of 2 and 0 one is. Superfluous arguments do not count.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile ragas==0.4.3 langchain-community==0.3.31 sacrebleu==2.6.0
cd "$folder"
RAGAS_DO_NOT_TRACK=true "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { tail -30 "$folder/log"; exit 1; }
import asyncio
from importlib.metadata import version

import sacrebleu
from ragas.dataset_schema import MultiTurnSample, SingleTurnSample
from ragas.messages import AIMessage, HumanMessage, ToolCall
from ragas.metrics import BleuScore, ToolCallAccuracy
from ragas.metrics.collections import BleuScore as NewBleuScore
from ragas.metrics.collections import CHRFScore

changed = "the behaviour has changed"
print(f"ragas {version('ragas')}, sacrebleu {version('sacrebleu')}")

RIGHT = ["The model was compressed to eight bits", "The accuracy dropped by one percent on the test set", "It is four times as fast"]
OTHER = ["Bananas are yellow and grow on trees in the warm south", "I like turtles very much"]
reference = ". ".join(RIGHT)
responses = {
    "the reference": (reference, 1),
    "its first sentence and two others": (". ".join(RIGHT[:1] + OTHER), 1),
    "its last sentence alone": (RIGHT[2], 1),
    "a preface and the reference": (f"Sure, here is the answer to your question. {reference}", 0.06),
}
for name, (response, expected) in responses.items():
    sample = SingleTurnSample(response=response, reference=reference)
    score = asyncio.run(BleuScore().single_turn_ascore(sample))
    new = asyncio.run(NewBleuScore().ascore(response=response, reference=reference)).value
    whole = sacrebleu.sentence_bleu(response, [reference]).score / 100
    first = sacrebleu.sentence_bleu(response.split(". ")[0], RIGHT, use_effective_order=False).score / 100
    print(f"{name}: BleuScore {score:.2f}, of the whole texts {whole:.2f}, of its first sentence and three references {first:.2f}")
    assert abs(score - expected) < 0.01 and abs(new - score) < 1e-9 and abs(first - score) < 1e-9, changed
    assert abs(whole - score) < 0.001 if response == reference else abs(whole - score) > 0.5, changed
    characters = asyncio.run(CHRFScore().ascore(response=response, reference=reference)).value
    assert abs(characters - sacrebleu.sentence_chrf(response, [reference]).score / 100) < 1e-9


def call(x, name="load", **more):
    return ToolCall(name=name, args={"x": x, **more})


def accuracy(calls, references, strict):
    sample = MultiTurnSample(user_input=[HumanMessage(content="?"), AIMessage(content="", tool_calls=calls)], reference_tool_calls=references)
    return asyncio.run(ToolCallAccuracy(strict_order=strict).multi_turn_ascore(sample))


cases = {  # name: calls, references, strict score, score in any order
    "both": ([call(1), call(2)], [call(1), call(2)], 1, 1),
    "swapped": ([call(2), call(1)], [call(1), call(2)], 0, 1),
    "one of two": ([call(1)], [call(1), call(2)], 0, 0),
    "nine of ten": ([call(place) for place in range(9)], [call(place) for place in range(10)], 0, 0),
    "one too many": ([call(1), call(2), call(3, "save")], [call(1), call(2)], 0, 0),
    "a second try": ([call(7), call(1)], [call(1)], 0, 0),
    "(2), (3) for (1), (2)": ([call(2), call(3)], [call(1), call(2)], 0, 0),
    "(2), (0) for (1), (2)": ([call(2), call(0)], [call(1), call(2)], 0, 0.5),
    "an argument too many": ([call(1, overwrite=True)], [call(1)], 1, 1),
}
for name, (calls, references, strict, loose) in cases.items():
    seen = accuracy(calls, references, True), accuracy(calls, references, False)
    print(f"tool calls, {name}: {seen[0]:.2f} in order, {seen[1]:.2f} in any order")
    assert seen == (strict, loose), changed
PYTHON
