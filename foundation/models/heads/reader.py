"""Models that find the answer to a question in a text: stock classes, such as BertForQuestionAnswering, with both logits in one tensor.

    logits_BS2 = (start logits, end logits)        of padding PADDING_LOGIT: it takes no part in any softmax over the tokens

The score of no answer is compared with a threshold, which config.json has as `null_threshold`; without the key there always is an
answer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from foundation.models.library import in_place_of

THRESHOLD_KEY = "null_threshold"
PADDING_LOGIT = -1e4
"""exp(-10000) is 0 in float32, and float16 still holds the number."""


@functools.cache
def reader_class(stock: Any) -> Any:
    """Returns a subclass of a stock class whose `logits` belong to start and end, float `[B, S, 2]`; it keeps name and weights.

    It has to be a class because Transformers calls the constructor itself when it loads weights.
    """

    class Reader(stock):  # type: ignore[misc]
        def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            from transformers.modeling_outputs import TokenClassifierOutput

            found = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            logits_BS2 = torch.stack([found.start_logits, found.end_logits], dim=-1)
            if attention_mask is not None and attention_mask.ndim == 2:  # engines get another form, and nobody reads padding there
                logits_BS2 = logits_BS2.masked_fill(attention_mask[..., None] == 0, PADDING_LOGIT)
            return TokenClassifierOutput(
                logits=logits_BS2, hidden_states=getattr(found, "hidden_states", None), attentions=getattr(found, "attentions", None)
            )

    return in_place_of(stock, Reader)
