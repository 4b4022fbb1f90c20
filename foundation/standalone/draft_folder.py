"""A folder that OpenVINO GenAI opens next to a draft, whatever tokenizer the model has. Needs only openvino; it is copied to servers.

GenAI takes token ids, and opens a model without a tokenizer. With a draft it asks the tokenizers of both models for the ids of a text and
compares them. It is given the same stand-in for both: a graph that gives every text one token. That the vocabularies are the same is known
before (`foundation.models.inputs.vocabulary`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import openvino
from openvino import opset15 as ops

TOKENIZER = "openvino_tokenizer.xml"
FILES = ("openvino_model.xml", "openvino_model.bin", "config.json", "generation_config.json")


@contextmanager
def with_stand_in(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder with the files of a model and the stand-in; GenAI has read them once it has opened it.

    Args:
        folder: What OpenVINO GenAI reads.
    """
    with TemporaryDirectory(prefix="draft-") as temporary:
        place = Path(temporary)
        for name in FILES:
            if (folder / name).exists():
                (place / name).symlink_to((folder / name).absolute())
        openvino.save_model(_stand_in(), place / TOKENIZER, compress_to_fp16=False)
        yield place


def _stand_in() -> openvino.Model:
    """Returns the graph: of n texts `input_ids` 0 and `attention_mask` 1, int64 [n, 1]."""
    texts = ops.parameter(openvino.PartialShape([-1]), openvino.Type.string)
    shape = ops.concat([ops.shape_of(texts, output_type="i64"), ops.constant(np.array([1], np.int64))], axis=0)
    outputs = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        node = ops.broadcast(ops.constant(np.array(value, np.int64)), shape)
        node.output(0).get_tensor().set_names({name})
        outputs.append(node)
    return openvino.Model(outputs, [texts], "one_token")
