"""Choices of the stage `export`, apart from the stage itself: read without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from foundation.core.config import Config
from foundation.core.speculation import DRAFT_TOKENS, MAX_TOKENS

FloatPrecision = Literal["fp32", "bf16", "fp16"]
FloatSetting = FloatPrecision | Literal["auto"]
"""The setting `float_precision`."""


class Generation(Config):
    """How engines that answer prompts keep keys and values, and what they are asked to prove that they are right."""

    kv_cache: Literal["float", "fp16", "int8"] = "float"
    """Precision of the cache of keys and values. float: the precision that the engine computes in, fp32 or bf16; fp16: half the memory of
    fp32; int8: a quarter. Less than float changes answers: the engine is checked against torch with float, and the report shows the
    cost."""
    batch_invariant: bool = False
    """Whether an answer has to be the same alone and in company, to the last bit: with any number of others, which come and go, and in the
    server. For onnxruntime_decoder, which then reads each prompt by itself and steps an even number of rows."""
    prompts: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Number of prompts: the starts of evaluation blocks, the sources of evaluation pairs, or questions."""
    questions: Annotated[str, Field(min_length=1)] | None = None
    """A UTF-8 file with one question a line, for a decoder to answer in place of starts of blocks: in its chat template, if the tokenizer
    has one, up to its end token."""
    tokens: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Most tokens of each answer, taken greedily. A block continues for so many; together with its start they are at most
    data.max_length."""
    draft: str | None = None
    """A smaller variant of the run that proposes tokens to the others: the id of a stage. Greedy answers stay the same; the
    report shows how many tokens were accepted and what that does to the speed."""
    draft_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = DRAFT_TOKENS
    """Tokens that the draft proposes at once."""
    prompt_lookup: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Tokens that the text itself proposes at once: what followed its last tokens where they occurred before. Not together with a draft."""

    @model_validator(mode="after")
    def _one_proposes(self) -> Self:
        if self.draft is not None and self.prompt_lookup is not None:
            raise ValueError("draft and prompt_lookup given; one of them proposes tokens: leave the other out")
        if self.draft is None and self.draft_tokens != DRAFT_TOKENS:
            raise ValueError("draft_tokens given without draft; give a draft, or leave it out")
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what was not asked for, so that runs without it keep their cache keys."""
        left_out = {"draft", "draft_tokens"} if self.draft is None else set()
        left_out |= set() if self.batch_invariant else {"batch_invariant"}
        left_out |= {"prompt_lookup"} if self.prompt_lookup is None else set()
        left_out |= {"questions"} if self.questions is None else set()
        return {key: value for key, value in whole(self).items() if key not in left_out}
