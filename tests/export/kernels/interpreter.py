"""Runs kernels in the interpreter of the Triton language: reads a function and its arguments, writes the result or the exception.

The language decides between interpreter and compiler when it is imported, so that a process is one or the other for good. Tests run in a
process that compiles; this one interprets, and its environment is nobody else's.
"""

import os
import pickle
import sys
from typing import Any


def serve() -> None:
    """Answers one call after another, until the standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not stand between the answers
    while True:
        try:
            function, arguments, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            answer = True, function(*arguments, **named)
        except Exception as error:  # goes to the test, which raises it
            answer = False, error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
