"""Rules for the fields of a machine; all that are broken are reported together."""

from __future__ import annotations

from paro.errors import UserError

_MAX = 1e30  # of any time, size or rate; sums and products of them stay finite


def refuse(*wrong: str | None) -> None:
    """Raises `UserError` with those of these rules that are broken, if there are any."""
    broken = [text for text in wrong if text is not None]
    if broken:
        raise UserError(*broken)


def rule(field: str, value: object, holds: bool, allowed: str) -> str | None:
    """What is wrong with the value of a field; None if the rule holds."""
    return None if holds else f"{field}: {value} is not allowed, it must be {allowed}"


def numbers(record: object, *fields: str, or_zero: bool = False) -> list[str | None]:
    """The rules of fields that hold a number, or None, which sums and products may use."""
    least = "a number of 0 or more" if or_zero else "a positive number"
    values = {field: getattr(record, field) for field in fields}
    return [
        rule(
            field,
            value,
            0 < value <= _MAX or (or_zero and value == 0),
            f"{least} and at most {_MAX:g}",
        )
        for field, value in values.items()
        if value is not None
    ]
