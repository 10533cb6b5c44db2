"""Methods whose results are cached in their object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Self = TypeVar("Self")
Found = TypeVar("Found")
Method = Callable[Concatenate[Self, P], Found]


def cached_by(
    key: Callable[P, Hashable],
) -> Callable[[Method[Self, P, Found]], Method[Self, P, Found]]:
    """Make a method cache its results in the object, by the `key` of its arguments."""

    def cached(method: Method[Self, P, Found]) -> Method[Self, P, Found]:
        name = f"_{method.__name__}_of"

        @wraps(method)
        def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> Found:
            known: dict[Hashable, Found] = vars(self).setdefault(name, {})
            own = key(*args, **kwargs)
            if own not in known:
                known[own] = method(self, *args, **kwargs)
            return known[own]

        return call

    return cached
