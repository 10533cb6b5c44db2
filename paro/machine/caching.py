"""Methods whose results are cached in their object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Self = TypeVar("Self")
Result = TypeVar("Result")
Method = Callable[Concatenate[Self, P], Result]


def cached_by(
    key: Callable[P, Hashable],
) -> Callable[[Method[Self, P, Result]], Method[Self, P, Result]]:
    """Make a method cache its results in the object, by the `key` of its arguments."""

    def cached(method: Method[Self, P, Result]) -> Method[Self, P, Result]:
        name = f"_{method.__name__}_of"

        @wraps(method)
        def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> Result:
            known: dict[Hashable, Result] = vars(self).setdefault(name, {})
            cache_key = key(*args, **kwargs)
            if cache_key not in known:
                known[cache_key] = method(self, *args, **kwargs)
            return known[cache_key]

        return call

    return cached
