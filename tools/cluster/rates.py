"""Link rates as people and `tc` write them, `100mbit` or `8gbit`, in bits per second."""

from __future__ import annotations

import re

# tc's own units: `bit` after a decimal or binary prefix, `bps` for bytes; a bare number is bits.
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
             "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_UNITS = {
    f"{prefix}{unit}": factor * bits
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("bit", 1), ("bps", 8))
}


def bits_per_second(rate: str) -> int:
    """The bits per second of a rate such as `100mbit`, `1.5gbit`, `12mbps` (bytes) or `1000000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", rate.strip().lower())
    factor = _UNITS.get(match[2] or "bit") if match else None
    if match is None or factor is None:
        raise ValueError(f"{rate!r} is no rate; write a number and a unit, such as 100mbit, 8gbit")
    bits = round(float(match[1]) * factor)
    if bits < 8:
        raise ValueError(f"{rate!r} is no rate of a link: it has to be at least 8bit, a byte/s")
    return bits
