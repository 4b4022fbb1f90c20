"""Differences between the machines of several runs: processor, threads, versions. Times depend on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from compress.compare.model import Fact
from compress.compare.sides import Side
from compress.report.model.contents import Contents

UNIMPORTANT = ("memory_bytes",)
"""Facts that differ between starts of the same machine, and that no time depends on."""

NAMED = {"cpu": "CPU", "gpus": "GPUs", "compress": "the version of compress"}


def differences(sides: Sequence[Side]) -> list[dict[str, object]]:
    """Returns the differences between the machines of runs.

    Returns:
        `name`, such as `cpu`, `threads` or `versions.torch`, and `values` by the key of the run; null where a run does not say.
    """
    facts = {side.key: machine(side.report) for side in sides}
    names = list(dict.fromkeys(name for known in facts.values() for name in known))
    rows = {name: {key: known.get(name) for key, known in facts.items()} for name in names}
    first = sides[0].key
    return [{"name": name, "values": values} for name, values in rows.items() if any(one != values[first] for one in values.values())]


def machine(report: Contents) -> dict[str, object]:
    """Returns the hardware and libraries that times of a report depend on, by name."""
    found = {name: value for name, value in report.environment.written().items() if name not in (*UNIMPORTANT, "versions")}
    timed = [row.threads for variant in report.variants for row in variant.latency if row.p50_ms]
    threads = sorted({one for one in timed if one is not None})
    found |= {"device": report.target.device, "threads": threads or None, "compress": report.compress}
    return found | {f"versions.{name}": value for name, value in report.environment.versions.items()}


def in_words(rows: Sequence[Fact]) -> str | None:
    """Returns the differences as part of a sentence: hardware by name, libraries counted; None if there are none."""
    named = [NAMED.get(row.name, str(row.name).replace("_", " ")) for row in rows if not row.name.startswith("versions.")]
    libraries = len(rows) - len(named)
    if libraries:
        named.append("the version of one library" if libraries == 1 else f"the versions of {libraries} libraries")
    return ", ".join(named) or None
