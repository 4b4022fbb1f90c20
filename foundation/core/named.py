"""Recipe keys whose value must be the name of a row in a table.

    Task = Annotated[str, Named(TASKS)]

Adding a row to the table makes its name valid in recipes, in their schema and in `compress list`. Unlike a `Literal`, the table is read
when a recipe is validated, not when the module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foundation.core.errors import nearest

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


@dataclass(frozen=True, eq=False)
class Named:
    """Restricts a string to the row names of a table; used as `Annotated[str, Named(table)]`."""

    table: Mapping[str, object]
    """The rows by name, in the order in which messages list them."""

    def check(self, value: Any) -> str:
        """Returns the value if it is the name of a row.

        Raises:
            PydanticCustomError: It is not; the message has the form of a `Literal` error and suggests the nearest name.
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
    """Joins names for a message: "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
