"""A causal language model of Transformers as labeller.

    log p(w | prompt) = sum_t log p(token t of w | prompt, tokens before t)

Tokens of a word are the tokens of prompt and word together without the tokens of the prompt, so that a word is tokenized as the model would
write it. A prompt whose last token changes when the word follows is refused: its probability would be the probability of another text.

Work is shared by the cache of keys and values: the tokens that all prompts begin with (instructions, few-shot examples) run once; the rest
of a prompt runs once for all words; a word of k tokens runs k - 1 tokens more. Prompts of equal length form a batch, so that nothing is
padded, and an answer does not depend on the other rows but for rounding.

Tensor names: b rows, L tokens, V vocabulary, W words.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked, Sampled
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.machine.device import computing_device
from foundation.models.causal import check_causal
from foundation.models.checkpoint import load_weights
from foundation.models.config import read_config
from foundation.models.generation import answer_tokens, generate
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.models.library import REFUSED, one_line, preview, quiet, task_classes, task_of
from foundation.standalone.chat_template import Render, TemplateRefused, compiled

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENS_AT_ONCE = 4096
"""Tokens of a batch without the shared ones."""
MOST_SHARED = 16
"""At least this many tokens make it worth to run the beginning of the prompts by itself."""


class _Tokens(NamedTuple):
    prompt: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]


def check_model(folder: Path, path: str, key: str) -> PreTrainedConfig:
    """Returns the Transformers config of a labeller, after a check that needs no weights.

    Raises:
        InputError: It is no causal language model.
    """
    config = read_config(folder, key)
    classes = task_classes(config, task_of(config, generates=True))
    named = (config.architectures or [""])[0]
    if config.is_encoder_decoder or not classes or (named and named not in classes):
        given = f"{path} is a {named or config.model_type}"
        raise InputError(key, given, "a labeller needs a causal language model", "give a decoder with its language-model head")
    return config


class CausalScorer:
    """A causal language model, loaded in float32 on a CPU and as stored on a GPU.

    Args:
        folder: Its folder.
        path: Its name in the recipe, for messages.
        key: Key path of that name, for messages.

    Raises:
        InputError: The folder holds no causal language model with a cache of keys and values.
    """

    def __init__(self, folder: Path, path: str, key: str) -> None:
        import transformers

        self.path, self.key, self.folder = path, key, folder
        config = check_model(folder, path, key)
        device = computing_device()
        dtype = torch.float32 if device.type == "cpu" else getattr(config, "dtype", None) or torch.float32
        loaded, info = load_weights(transformers.AutoModelForCausalLM, folder, config, dtype)
        if lacking := info["missing"] | info["mismatched"]:
            raise InputError(key, f"{path} lacks weights: {preview(lacking)}", "a complete checkpoint is needed")
        self.model: Any = loaded.to(device).eval()
        self.tokenizer: Any = load_tokenizer(str(folder))
        self._render = self._renderer()
        self._check_cache(config)

    def _renderer(self) -> Render | None:
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            return None
        names = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items() if isinstance(value, str)}
        try:
            return compiled(template, names)
        except TemplateRefused as error:
            raise InputError(self.key, f"the chat template of {self.path} is not valid ({error})", remedy="give chat: false") from error

    def _check_cache(self, config: PreTrainedConfig) -> None:
        """Raises if the model reads later tokens, or returns no cache that several rows can share."""
        device = self.model.device
        check_causal(config, lambda features: self.model(features["input_ids"].to(device)).logits.float().cpu())
        with torch.no_grad():
            found = self.model(torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=True)
        if not hasattr(getattr(found, "past_key_values", None), "batch_repeat_interleave"):
            raise InputError(self.key, f"{self.path} returns no cache of keys and values", "a labeller needs one", "give another model")

    @property
    def _most(self) -> int | None:
        most = getattr(self.model.config, "max_position_embeddings", None) or getattr(self.model.config, "n_positions", None)
        return most if isinstance(most, int) else None

    def _text(self, query: Query) -> str:
        if isinstance(query.prompt, str):
            return query.prompt
        if self._render is None:
            raise InputError(self.key, f"{self.path} has no chat template", "the prompt file says chat: true", "give chat: false")
        try:
            return self._render(query.messages, add_generation_prompt=True)
        except TemplateRefused as error:
            raise InputError(
                self.key, f"the chat template of {self.path} refuses the prompt ({error})", remedy="give chat: false"
            ) from error

    def _ids(self, query: Query, after: str = "") -> tuple[int, ...]:
        """Returns the token ids of a prompt and what follows; a rendered chat brings its special tokens as text."""
        found: list[int] = self.tokenizer(self._text(query) + after, add_special_tokens=isinstance(query.prompt, str))["input_ids"]
        eos = self.tokenizer.eos_token_id
        if isinstance(query.prompt, str) and found and found[-1] == eos:  # some tokenizers end every text
            found = found[:-1]
        return tuple(found)

    def _tokens(self, asked: Asked) -> _Tokens:
        prompt = self._ids(asked.query)
        if not prompt:
            raise InputError(self.key, "a prompt without tokens", "the model needs one token to continue", "begin templates with a word")
        words = []
        for word in asked.words:
            whole = self._ids(asked.query, asked.query.gap + word)
            if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
                end = self._text(asked.query)[-20:]
                given = f"the tokens of {end!r} change when {word!r} follows"
                raise InputError(
                    self.key, given, "a word has tokens of its own", "end the template before {label} with a space or a line break"
                )
            words.append(whole[len(prompt) :])
        most, longest = self._most, len(prompt) + max(map(len, words)) - 1
        if most is not None and longest > most:
            given = f"a prompt with its word has {longest} tokens: {shown(self._text(asked.query), 60)}"
            raise InputError(self.key, given, f"{self.path} reads at most {most}", "give fewer examples or shorter texts")
        return _Tokens(prompt, tuple(words))

    def scores(self, asked: Sequence[Asked]) -> Iterator[tuple[list[int], Array]]:
        """See `Scorer`."""
        tokens = [self._tokens(one) for one in asked]
        shared = _shared([one.prompt for one in tokens])
        alike: dict[tuple[int, tuple[tuple[int, ...], ...]], list[int]] = {}
        for index, one in enumerate(tokens):
            alike.setdefault((len(one.prompt), one.words), []).append(index)
        with torch.no_grad():
            before = None if not shared else self._run(torch.tensor([shared], device=self.model.device), None).past_key_values
            for (length, words), indices in sorted(alike.items(), key=lambda item: -item[0][0]):
                at_once = max(1, TOKENS_AT_ONCE // (length - len(shared)))
                for start in range(0, len(indices), at_once):
                    chosen = indices[start : start + at_once]
                    ids = torch.tensor([tokens[index].prompt[len(shared) :] for index in chosen], device=self.model.device)
                    sums = self._word_scores(ids, words, before)
                    lengths = np.tile(np.array([len(word) for word in words], np.float32), (len(chosen), 1))
                    yield chosen, np.stack([sums.numpy(), lengths], axis=1)

    def _word_scores(self, ids_bL: Tensor, words: Sequence[tuple[int, ...]], before: Any) -> Tensor:
        """Returns the sum of the log-probabilities of the tokens of each word, float32 [b, W]."""
        cache = copy.deepcopy(before)
        if cache is not None:
            cache.batch_repeat_interleave(len(ids_bL))
        found = self._run(ids_bL, cache)
        first_bV = found.logits[:, -1].float().log_softmax(-1)
        sums = []
        for word in words:
            sum_b = first_bV[:, word[0]]
            if len(word) > 1:
                rest = torch.tensor(word[:-1], device=ids_bL.device).expand(len(ids_bL), -1)
                logits = self._run(rest, copy.deepcopy(found.past_key_values), every=True).logits.float().log_softmax(-1)
                following = torch.tensor(word[1:], device=ids_bL.device).expand(len(ids_bL), -1)
                sum_b = sum_b + logits.gather(-1, following[..., None])[..., 0].sum(-1)
            sums.append(sum_b)
        return torch.stack(sums, 1).cpu()

    def _run(self, ids_bL: Tensor, cache: Any, every: bool = False) -> Any:
        """Runs tokens after the tokens of a cache, which is extended; logits of the last token alone, or of every token."""
        kept = {} if every or "logits_to_keep" not in inspect.signature(self.model.forward).parameters else {"logits_to_keep": 1}
        try:
            return self.model(input_ids=ids_bL, past_key_values=cache, use_cache=True, **kept)
        except REFUSED as error:
            raise InputError(self.key, f"{self.path} cannot run ({one_line(error)})", remedy="give another model") from error

    def texts(self, query: Query, count: int, sampled: Sampled) -> list[str | None]:
        """See `Scorer`: a text ends at the end token, and without chat at a line break too."""
        ids = torch.tensor([self._ids(query)], device=self.model.device)
        if self._most is not None and ids.shape[1] + sampled.max_tokens > self._most:
            given = f"a prompt for texts of {ids.shape[1]} tokens, and max_tokens {sampled.max_tokens}"
            raise InputError(self.key, given, f"{self.path} reads at most {self._most}", "give a shorter prompt, or fewer max_tokens")
        ends = answer_tokens(self.model).ends or ((self.tokenizer.eos_token_id,) if self.tokenizer.eos_token_id is not None else ())
        settings = {
            "do_sample": True,
            "temperature": sampled.temperature,
            "top_p": sampled.top_p,
            "max_new_tokens": sampled.max_tokens,
            "num_return_sequences": count,
        }
        with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []), torch.no_grad(), quiet():
            torch.manual_seed(sampled.seed)
            found = generate(self.model, ends, settings, input_ids=ids, attention_mask=torch.ones_like(ids))
        return [self._ended(row, ends, lines=isinstance(query.prompt, str)) for row in found[:, ids.shape[1] :].tolist()]

    def _ended(self, ids: list[int], ends: Sequence[int], lines: bool) -> str | None:
        end = next((place for place, token in enumerate(ids) if token in ends), None)
        text: str = self.tokenizer.decode(ids[:end], skip_special_tokens=True).strip()
        if lines and "\n" in text:
            return text.split("\n")[0].strip()
        return None if end is None else text


def _shared(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the tokens that all prompts begin with; at least one token of each prompt is left out, and nothing if they are few."""
    first, last = min(prompts), max(prompts)  # in lexicographic order: these two differ first
    most = min(map(len, prompts)) - 1
    count = next((place for place in range(most) if first[place] != last[place]), most)
    return first[:count] if count >= MOST_SHARED else ()
