"""The type of a JSON value: what `json.loads` returns, for documents that have no model of their own."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
