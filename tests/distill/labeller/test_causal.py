"""A model of Transformers as labeller: the same log-probabilities as one whole pass for each text and word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from distill.labeller import causal
from distill.labeller.causal import CausalScorer
from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked, Sampled
from tests.distill.labeller.tiny_labellers import changed, model
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

WORDS = ("good", "really poor", "bad")
BEGIN = "Review: a great film that I love, from the first minute\nSentiment: good\n\n"
TEXTS = ("fine", "dull and poor", "a", "dull and good", "x" * 30, "caf\u00e9 \u2603")


def scorer(kind: str = "llama", chat: bool = False) -> CausalScorer:
    return CausalScorer(model(kind, chat), "tiny", "teacher.path")


def asked(begin: str, words: tuple[str, ...] = WORDS) -> list[Asked]:
    return [Asked(Query(f"{begin}Review: {text}\nSentiment:", " "), words) for text in TEXTS]


def answers(one: CausalScorer, queries: list[Asked]) -> np.ndarray:
    found = np.full((len(queries), 2, len(queries[0].words)), np.nan, np.float32)
    for indices, values in one.scores(queries):
        found[indices] = values
    return found


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "qwen2"])
@pytest.mark.parametrize("begin", ["", BEGIN])
def test_scores_are_those_of_whole_texts(kind: str, begin: str) -> None:
    queries = asked(begin)
    found = answers(scorer(kind), queries)
    stock = transformers.AutoModelForCausalLM.from_pretrained(model(kind)).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model(kind) / "tokenizer.json"))
    for n, query in enumerate(queries):
        prompt = tokenizer(str(query.query.prompt))["input_ids"]
        for w, word in enumerate(WORDS):
            whole = tokenizer(f"{query.query.prompt} {word}")["input_ids"]
            with torch.no_grad():
                log_p = stock(torch.tensor([whole])).logits[0].log_softmax(-1)
            expected = sum(float(log_p[place - 1, whole[place]]) for place in range(len(prompt), len(whole)))
            assert found[n, 0, w] == pytest.approx(expected, abs=2e-4)
            assert found[n, 1, w] == len(whole) - len(prompt)
    assert found[:, 1].max() > 1  # words of several tokens are among them


def test_shared_tokens_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, lengths = scorer(), list[int]()
    run = CausalScorer._run

    def counted(self: Any, ids: Any, cache: Any, every: bool = False) -> Any:
        lengths.append(ids.numel())
        return run(self, ids, cache, every)

    monkeypatch.setattr(CausalScorer, "_run", counted)
    queries = asked(BEGIN)
    tokens = [one._tokens(query) for query in queries]
    shared = next(place for place, several in enumerate(zip(*(each.prompt for each in tokens), strict=False)) if len(set(several)) > 1)
    answers(one, queries)
    rest = sum(len(each.prompt) - shared + sum(len(word) - 1 for word in each.words) for each in tokens)
    assert shared > 20
    assert sum(lengths) == shared + rest


def test_equal_prompts_are_scored_too() -> None:
    found = answers(scorer(), asked(BEGIN)[:1] * 3)
    np.testing.assert_allclose(found[0], found[2], rtol=1e-6)  # rows of a product are added up in an order of their own


def test_batches_do_not_change_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answers(scorer(), asked(BEGIN))
    monkeypatch.setattr(causal, "TOKENS_AT_ONCE", 1)
    np.testing.assert_allclose(answers(scorer(), asked(BEGIN)), whole, rtol=1e-5, atol=1e-5)


def test_a_chat_is_scored_as_its_template_renders_it() -> None:
    one = scorer(chat=True)
    chat = Asked(Query((("system", "Label."), ("user", "dull"), ("assistant", "bad"), ("user", "fine")), ""), WORDS)
    text = Asked(Query("<system>Label.\n<user>dull\n<assistant>bad\n<user>fine\n<assistant>", ""), WORDS)
    np.testing.assert_array_equal(answers(one, [chat]), answers(one, [text]))


def test_a_model_without_a_chat_template_is_refused() -> None:
    with raises_problem("teacher.path", "no chat template", "chat: false"):
        list(scorer().scores([Asked(Query((("user", "fine"),), ""), WORDS)]))


def test_more_tokens_than_the_context_are_refused_before_any_row_runs() -> None:
    queries = [*asked(""), Asked(Query("a b" * 300, " "), WORDS)]
    with raises_problem("teacher.path", "tokens", "reads at most 512"):
        next(iter(scorer().scores(queries)))


def test_a_word_that_changes_the_tokens_of_the_prompt_is_refused() -> None:
    with raises_problem("teacher.path", "change when", "break"):
        list(scorer().scores([Asked(Query("Sentiment: ", ""), ("good",))]))


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    folder = changed(model(), tmp_path / "a", architectures=["LlamaForSequenceClassification"])
    with raises_problem("teacher.path", "LlamaForSequenceClassification", "causal language model"):
        CausalScorer(folder, "tiny", "teacher.path")


def test_an_encoder_with_a_language_model_head_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 290}
    transformers.BertLMHeadModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)  # reads both sides
    with raises_problem("model", "bert", "causal model"):
        (tmp_path / "tokenizer.json").write_bytes((model() / "tokenizer.json").read_bytes())
        CausalScorer(tmp_path, "tiny", "teacher.path")


def test_a_model_without_a_cache_of_keys_and_values_is_refused(tmp_path: Path) -> None:
    made = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=290, hidden_size=16, num_hidden_layers=1, state_size=4))
    made.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((model() / "tokenizer.json").read_bytes())
    with raises_problem("teacher.path", "no cache"):
        CausalScorer(tmp_path, "tiny", "teacher.path")


def test_texts_are_the_same_for_a_seed_and_end_at_a_line() -> None:
    one, query = scorer(), Query("Review: good movie", "")
    sampled = Sampled(temperature=1.0, top_p=0.9, max_tokens=12, seed=3)
    found = one.texts(query, 6, sampled)
    assert found == one.texts(query, 6, sampled)
    assert found != one.texts(query, 6, Sampled(1.0, 0.9, 12, 4))
    assert len(found) == 6
    assert all(text is None or "\n" not in text for text in found)
    with raises_problem("teacher.path", "max_tokens 511", "512"):
        one.texts(query, 1, Sampled(1.0, 0.9, 511, 0))


def test_a_text_ends_at_the_end_token_or_at_a_line() -> None:
    one = scorer()
    ids = one.tokenizer("good movie\nbad")["input_ids"]
    assert one._ended(ids, (0,), lines=True) == "good movie"
    assert one._ended(ids, (0,), lines=False) is None
    assert one._ended([*ids, 0, *ids], (0,), lines=False) == "good movie\nbad"
    assert one._ended(one.tokenizer("good")["input_ids"], (0,), lines=True) is None
