"""The rows that the parity gate looks at.

A mode that does not agree with torch is left out, which is a choice; so it is made on selection rows. Evaluation rows are for reported
results only (`foundation.data.splits`): no engine answers them before it has passed.
"""

from __future__ import annotations

from foundation.data.splits import Data, Split

GATE_ROWS = 1000


def gate_rows(data: Data) -> Split:
    """Returns up to `GATE_ROWS` rows, evenly spread over the selection split; over the train split if that is empty."""
    split = data.selection if len(data.selection) else data.train
    return split.take(split.labels.evenly(GATE_ROWS))
