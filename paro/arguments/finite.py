"""The type of numeric flags: a number that is neither infinite nor NaN."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError


def finite(text: str) -> float:
    """The number in `text`; a `ValueError` for what is none, as `float` raises it."""
    number = float(text)
    if not math.isfinite(number):
        raise ArgumentTypeError(f"{text.strip()} is not a finite number")
    return number
