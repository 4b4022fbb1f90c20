"""How many tokens prompt look-up would be accepted for: answers to questions, their own text as the source of proposals.

    python benchmarks/decoding/lookup.py MODEL questions.txt [--prompts 200] [--tokens 64] [--at-once 2 4 8]

MODEL is a folder of Transformers. torch answers each question greedily in the chat format, up to its end token. Greedy answers are the
same with proposals and without, so that the answers alone say what a step would propose and accept (`foundation.core.speculation`):

    acceptance         accepted tokens / proposed tokens
    tokens per step    answer tokens / steps of the model, the reading of the prompt included

What that is worth depends on what a step of several tokens costs: it pays only where tokens per step are more than the time of a step of
k + 1 tokens over the time of a step of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from export.choices import Generation
from export.generation.prompts import Prompts, greedy
from foundation.core.speculation import look_up
from foundation.measure.tokens import ENDED
from foundation.models.checkpoint import load_float
from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.inputs.questions import read_questions


def main() -> None:
    """Answers, replays, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("questions", help="a file with a question a line")
    parser.add_argument("--prompts", type=int, default=200, help="questions, evenly spaced")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--at-once", type=int, nargs="+", default=[2, 4, 8], help="tokens that are proposed at once")
    arguments = parser.parse_args()
    checkpoint = Checkpoint(arguments.model)
    settings = Generation(prompts=arguments.prompts, tokens=arguments.tokens)
    prompts = Prompts.of_questions(read_questions(arguments.questions, "questions"), settings, checkpoint, most_tokens(checkpoint.config))
    answers = [row[row != ENDED].tolist() for row in greedy(load_float(checkpoint.folder), prompts)]
    print(f"{len(answers)} answers, {sum(map(len, answers))} tokens")
    for count in arguments.at_once:
        found = [replayed(prompt.tolist(), answer, count, arguments.tokens) for prompt, answer in zip(prompts.rows, answers, strict=True)]
        steps, proposed, accepted = (sum(each) for each in zip(*found, strict=True))
        written = sum(map(len, answers))
        print(
            f"{count} at once: {accepted} of {proposed} accepted ({accepted / max(1, proposed):.1%}), {written / steps:.3f} tokens per step"
        )


def replayed(prompt: Sequence[int], answer: Sequence[int], count: int, most: int) -> tuple[int, int, int]:
    """Returns the steps in which an answer would have come, and the tokens that were proposed and accepted.

    Args:
        prompt: Token ids.
        answer: Token ids of the greedy answer.
        count: Most tokens that are proposed at once.
        most: Most tokens of an answer.
    """
    steps, proposed, accepted = 1, 0, 0
    done = 1
    while done < len(answer):
        offered = look_up([*prompt, *answer[:done]], min(count, most - done - 1))
        right = next((place for place, token in enumerate(offered) if answer[done + place : done + place + 1] != [token]), len(offered))
        steps, proposed, accepted = steps + 1, proposed + len(offered), accepted + right
        done += right + 1
    return steps, proposed, accepted


if __name__ == "__main__":
    main()
