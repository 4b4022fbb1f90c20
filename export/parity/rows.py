"""The rows that the parity gate looks at.

A mode that does not agree with torch is left out, which is a choice; so it is made on selection rows. Evaluation rows are for reported
results only (`foundation.data.splits`): no engine answers them before it has passed.
"""

from __future__ import annotations

from foundation.core.forms.zero_shot import are_images_and_texts
from foundation.core.spread import spread
from foundation.data.splits import Data, Split
from foundation.measure.closeness import spread_rows

GATE_ROWS = 1000


def gate_rows(data: Data) -> Split:
    """Returns up to `GATE_ROWS` rows, evenly spread over the selection split; over the train split if that is empty."""
    split = data.selection if len(data.selection) else data.train
    if are_images_and_texts(split.labels):
        return split.take(spread_rows(range(len(split)), GATE_ROWS, split.labels))
    return split.take(spread(range(len(split)), GATE_ROWS))
