"""Commands whose arguments and options are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

Given = TypeVar("Given")


def takes(arguments: type[Given]) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Make a function of one dataclass a command: each field is an argument or option, its own before inherited ones.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Greeting:
    ...     name: str
    ...     times: int = 1
    >>> @takes(Greeting)
    ... def greet(given: Greeting) -> None:
    ...     print(f"hello {given.name}" * given.times)
    >>> from inspect import signature
    >>> list(signature(greet).parameters)
    ['name', 'times']
    >>> greet(name="there")
    hello there
    """
    types = get_type_hints(arguments, include_extras=True)
    fields = [field for field in dataclasses.fields(arguments) if field.init]  # type: ignore[arg-type]
    fields.sort(key=lambda field: field.name not in arguments.__annotations__)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=types[field.name],
        )
        for field in fields
    ]

    def decorate(run: Callable[[Given], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**values: Any) -> None:
            run(arguments(**values))

        command.__annotations__ = {field.name: types[field.name] for field in fields} | {"return": None}
        command.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return command

    return decorate
