"""How far ahead of their use all-gathers of updated parameters are queued."""

from __future__ import annotations

from paro.errors import UserError


def units_ahead(text: str | None, prefetch_units: int, *, by_nccl: bool) -> int | None:
    """The value of --paro-updated-ahead, None for all.

    Without the flag, all on CPU ranks. Under NCCL as few as possible, which costs almost nothing
    where launches are free and saves most where they keep their order (docs/planning.md).
    """
    if text == "all" or (text is None and not (by_nccl and prefetch_units)):
        return None
    if text is None:
        return prefetch_units + 1
    if not text.isdecimal() or int(text) <= prefetch_units:
        raise UserError(
            f"--paro-updated-ahead {text} must be all, or more than the {prefetch_units} of "
            "--paro-prefetch-units: a unit is gathered behind its updated parameters"
        )
    return int(text)
