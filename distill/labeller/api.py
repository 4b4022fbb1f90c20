"""A server with the API of OpenAI as labeller: any that returns log-probabilities, such as `compress serve`, vLLM or OpenAI's.

Without chat, a template is sent to `/completions`, and the probability of a word is followed along the tokens of the server:

    rest <- gap + word
    while rest: of the listed tokens that begin rest the longest; add its log-probability; ask again with the token appended

A word of one token costs nothing beyond the query of its text. With chat, messages are sent to `/chat/completions`, which cannot continue
an answer: the probability of a word is the probability of the first tokens that begin it. A token that begins words of two labels is
therefore refused there.

Servers list few tokens: 5 (completions) or 20 (chat) at OpenAI. The probability of a token that is not listed is at most the smallest
listed one and at most what the listed ones leave over; the smaller of these two is taken. The key is read from an environment variable when
a query is sent; it is never written anywhere. Texts are drawn with n = 1 and one seed each, as servers limit n.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked, Sampled
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.core.shown import reason, shown

if TYPE_CHECKING:
    from openai import OpenAI

AT_ONCE = 8
"""Queries in flight."""
LISTED, CHAT_LISTED = 5, 20
MOST_STEPS = 64
"""Most tokens of a word."""
NO_KEY = "none"
T = TypeVar("T")


class ApiScorer:
    """A model behind an API.

    Args:
        url: Base URL of the API.
        model: Name of the model.
        key_variable: Environment variable with the key; None for no key.
        where: Key path of the labeller, for messages.

    Raises:
        InputError: The client is not installed, or the variable is not set.
    """

    def __init__(self, url: str, model: str, key_variable: str | None, where: str) -> None:
        self.url, self.model, self.where = url, model, where
        self.client = _client(url, key_variable, where)

    def scores(self, asked: Sequence[Asked]) -> Iterator[tuple[list[int], Array]]:
        """See `Scorer`; answers come one by one."""
        yield from (([index], answer[None]) for index, answer in self._together(self._word_scores, asked))

    def texts(self, query: Query, count: int, sampled: Sampled) -> list[str | None]:
        """See `Scorer`; without chat a text ends at a line break too."""
        found = dict(self._together(lambda number: self._text(query, sampled, number), range(count)))
        return [found[number] for number in range(count)]

    def _together(self, ask: Callable[[Any], T], items: Sequence[Any]) -> Iterator[tuple[int, T]]:
        """Yields the result for each item with its index, in any order; at the first error no further one is asked."""
        waiting = iter(enumerate(items))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while chunk := list(islice(waiting, 8 * AT_ONCE)):
                futures = {pool.submit(ask, item): index for index, item in chunk}
                try:
                    for future in as_completed(futures):
                        yield futures[future], future.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def _word_scores(self, asked: Asked) -> Array:
        """Returns the answer to a query, float32 [2, W]."""
        if not isinstance(asked.query.prompt, str):
            return self._chat_scores(asked)
        listed: dict[str, Mapping[str, float]] = {}  # by the text before; words share what they begin with
        found = []
        for word in asked.words:
            rest, before, total, steps = asked.query.gap + word, asked.query.prompt, 0.0, 0
            while rest:
                if before not in listed:
                    listed[before] = self._completed(before)
                token = max((token for token in listed[before] if token and rest.startswith(token)), key=len, default=None)
                steps += 1
                if token is None or steps > MOST_STEPS:
                    total += _unlisted(listed[before].values())
                    break
                total, rest, before = total + listed[before][token], rest[len(token) :], before + token
            found.append((total, steps))
        return np.array(found, np.float32).T

    def _chat_scores(self, asked: Asked) -> Array:
        answer = self._sent(
            lambda: self.client.chat.completions.create(
                model=self.model,
                messages=asked.query.messages,  # type: ignore[arg-type]
                max_tokens=1,
                temperature=0,
                logprobs=True,
                top_logprobs=CHAT_LISTED,
            )
        )
        content = getattr(answer.choices[0].logprobs, "content", None) if answer.choices else None
        if not content:
            raise self._without_logprobs()
        listed = [(one.token.strip(), one.logprob) for one in content[0].top_logprobs]
        starts = [[number for number, word in enumerate(asked.words) if token and word.startswith(token)] for token, _ in listed]
        found = []
        for number, word in enumerate(asked.words):
            for (token, _), words in zip(listed, starts, strict=True):
                if number in words and len(words) > 1:
                    other = next(asked.words[one] for one in words if one != number)
                    given = f"the token {shown(token)} of {self.model} begins {word!r} and {other!r}"
                    raise InputError(f"{self.where}.labels", given, "a chat is asked for one token", "give other words, or chat: false")
            own = [logprob for (_, logprob), words in zip(listed, starts, strict=True) if number in words]
            found.append(float(np.logaddexp.reduce(own)) if own else _unlisted([logprob for _, logprob in listed]))
        return np.stack([np.array(found, np.float32), np.ones(len(found), np.float32)])

    def _completed(self, prompt: str) -> Mapping[str, float]:
        """Returns the listed tokens after a text with their log-probabilities."""
        answer = self._sent(
            lambda: self.client.completions.create(model=self.model, prompt=prompt, max_tokens=1, temperature=0, logprobs=LISTED)
        )
        top = getattr(answer.choices[0].logprobs, "top_logprobs", None) if answer.choices else None
        if not top or not top[0]:
            raise self._without_logprobs()
        found: Mapping[str, float] = top[0]
        return found

    def _text(self, query: Query, sampled: Sampled, number: int) -> str | None:
        settings: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampled.max_tokens,
            "temperature": sampled.temperature,
            "top_p": sampled.top_p,
            "seed": sampled.seed + number,
        }
        if isinstance(query.prompt, str):
            prompt = query.prompt
            choice = self._sent(lambda: self.client.completions.create(prompt=prompt, stop="\n", **settings)).choices[0]
            text = choice.text
        else:
            messages: Any = query.messages
            choice = self._sent(lambda: self.client.chat.completions.create(messages=messages, **settings)).choices[0]
            text = choice.message.content or ""
        return text.strip() if choice.finish_reason == "stop" else None

    def _sent(self, send: Callable[[], T]) -> T:
        import openai

        try:
            return send()
        except openai.OpenAIError as error:
            said = reason(error, 200).replace(self.client.api_key, "***")  # a server may quote what it was sent
            remedy = "check the URL, the model's name and the key"
            raise InputError(f"{self.where}.url", f"{self.url} did not answer ({said})", remedy=remedy) from None

    def _without_logprobs(self) -> InputError:
        given = f"{self.url} returned no log-probabilities for {self.model}"
        return InputError(f"{self.where}.url", given, "a labeller needs them", "give a server that returns top_logprobs")


def _unlisted(listed: Iterable[float]) -> float:
    """Returns an upper bound of the log-probability of a token that is not among the listed ones."""
    values = list(listed)
    left = max(1.0 - math.fsum(math.exp(value) for value in values), 1e-9)
    return min(*values, math.log(left))


def _client(url: str, key_variable: str | None, where: str) -> OpenAI:
    try:
        from openai import OpenAI
    except ImportError as error:
        raise InputError(f"{where}.url", "given without the client openai", remedy="pip install 'compress-transformers[api]'") from error
    if key_variable is None:
        return OpenAI(base_url=url, api_key=NO_KEY)
    key = os.environ.get(key_variable)
    if not key:
        raise InputError(f"{where}.key_variable", f"{key_variable} is not set", remedy=f"export {key_variable}, or leave key_variable out")
    return OpenAI(base_url=url, api_key=key)
