"""Whether tokens of a decoder depend on the positions of tokens after them, which paged attention and prompts read in parts would change.

Only causal attention looks back. Rotary frequencies that are chosen by the length of what is read look ahead: LongRoPE takes its long
factors for all tokens of a step once the largest position in it is over `original_max_position_embeddings`. Continuous batching reads
tokens of several texts in one step, and a long prompt in several steps. A short text would get the frequencies of its neighbour, and the
start of a long one the frequencies of a short text.

No name of a method is looked for. The graph is asked: 8 tokens at positions 0 to 7, and after them one at position 8 or at the last
position of the context. The logits of the 8 tokens are the same, unless lengths change them. Where lengths change them past the context
alone (dynamic NTK), that is no obstacle.
"""

from __future__ import annotations

import numpy as np
import openvino
from numpy.typing import NDArray

TOKENS = 8
TOLERANCE = 1e-4
"""Largest difference of a logit, as a share of the largest logit, that is the order of sums."""
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def looks_ahead(graph: openvino.Model, context: int, vocabulary: int) -> bool:
    """Returns whether the position of a later token changes the logits of those before it.

    Args:
        graph: What `export.generation.cached_graph` made.
        context: Most tokens that the model reads.
        vocabulary: Number of tokens that it knows.
    """
    if context <= TOKENS + 1:
        return False
    request = openvino.Core().compile_model(graph, "CPU", PROPERTIES).create_infer_request()
    near, far = (_logits(request, last, vocabulary) for last in (TOKENS, context - 1))
    return not bool(np.abs(near - far).max() <= TOLERANCE * np.abs(near).max())


def _logits(request: openvino.InferRequest, last: int, vocabulary: int) -> NDArray[np.float32]:
    """Returns the logits [8, V] of the tokens before one at position `last`."""
    request.reset_state()
    ids = np.arange(TOKENS + 1, dtype=np.int64) * (vocabulary - 1) // TOKENS
    found = request.infer(
        {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, TOKENS + 1), np.int64),
            "position_ids": np.array([[*range(TOKENS), last]], np.int64),
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    logits: NDArray[np.float32] = found["logits"][0, :TOKENS]
    return logits.copy()
