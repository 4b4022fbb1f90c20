"""A key of a recipe whose value is the name of a row of a table.

    Task = Annotated[str, Named(TASKS)]

A row added to the table is a name allowed in recipes, in their schema and in `compress list`: nothing is written twice. Unlike a `Literal`
the table is looked at when a recipe is read, not when the module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.core.errors import nearest

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


@dataclass(frozen=True, eq=False)
class Named:
    """Marks a text as the name of a row; stands in `Annotated[str, Named(table)]`."""

    table: Mapping[str, object]
    """The rows by their names, in the order in which messages list them."""

    def check(self, value: Any) -> str:
        """Returns the value where it is the name of a row.

        Raises:
            PydanticCustomError: It is not; reads like the error of a `Literal`, and proposes the nearest name.
        """
        from pydantic_core import PydanticCustomError

        if isinstance(value, str) and value in self.table:
            return value
        expected = one_of([repr(name) for name in self.table])
        near = nearest(value, self.table) if isinstance(value, str) else ""
        raise PydanticCustomError("literal_error", "Input should be {expected}{near}", {"expected": expected, "near": near})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.table), "type": "string"}


def one_of(names: Sequence[str]) -> str:
    """Returns names as a message lists what is allowed: "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
