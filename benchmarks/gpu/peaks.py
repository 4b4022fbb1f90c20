"""Published peaks of GPUs without sparsity, by which a time becomes a share.

From the data sheets of A100 80GB SXM and PCIe, A30, A10, L4, L40S, H100 SXM and PCIe, H200 SXM and HGX B200 (an eighth of it), and for the
RTX 5090 from the white paper of the RTX Blackwell architecture (fp16 products added in float32).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from export.kernels.launch import Cost, Unit


@dataclass(frozen=True)
class Gpu:
    """Published peaks."""

    name: str
    int8: float
    """Tera-operations per second."""
    fp16: float
    fp32: float
    bandwidth: float
    """Terabytes per second."""

    def peak(self, unit: Unit) -> float:
        """Returns the operations per second of a unit."""
        return float({"int8": self.int8, "fp16": self.fp16, "fp32": self.fp32}[unit]) * 1e12

    def floor_s(self, cost: Cost) -> float:
        """Returns max(bytes / bandwidth, operations / peak) in seconds: no kernel is faster."""
        return max(cost.num_bytes / (self.bandwidth * 1e12), cost.operations / self.peak(cost.unit))


GPUS = {
    80: Gpu("A100 SXM", 624, 312, 19.5, 2.039),
    86: Gpu("A10", 250, 125, 31.2, 0.600),
    89: Gpu("L4", 242, 121, 30.3, 0.300),
    90: Gpu("H100 SXM", 1979, 989, 67, 3.35),
    100: Gpu("B200", 4500, 2250, 75, 8.0),
    120: Gpu("RTX 5090", 838, 209.5, 104.8, 1.792),
}
"""One GPU for each compute capability, for tables that are made without one."""
NAMED = (
    (r"A100-SXM\S*-80GB", GPUS[80]),
    (r"A100 80GB PCIe", Gpu("A100 PCIe", 624, 312, 19.5, 1.935)),
    (r"A30\b", Gpu("A30", 330, 165, 10.3, 0.933)),
    (r"A10\b", GPUS[86]),
    (r"L40S\b", Gpu("L40S", 733, 362.05, 91.6, 0.864)),
    (r"L4\b", GPUS[89]),
    (r"H100 PCIe", Gpu("H100 PCIe", 1513, 756, 51, 2.0)),
    (r"H100 80GB HBM3", GPUS[90]),
    (r"H200$", Gpu("H200 SXM", 1979, 989, 67, 4.8)),
    (r"B200$", GPUS[100]),
    (r"RTX 5090$", GPUS[120]),
)
"""How the driver calls a GPU, as a regular expression, and its peaks."""


def named(device: str) -> Gpu | None:
    """Returns the published peaks of a GPU by the name that the driver gives it; None where it is not in the table."""
    return next((gpu for pattern, gpu in NAMED if re.search(rf"\b{pattern}", device)), None)
