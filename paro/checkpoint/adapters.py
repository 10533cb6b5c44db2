"""The adapters of a checkpoint, and whether they are those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.lora_config import LoraConfig
from paro.checkpoint.directory import COMMON
from paro.errors import UserError
from paro.untrusted.schema import conform


def adapters_of(common: Mapping[str, Any], directory: Path) -> LoraConfig | None:
    """The adapters of a checkpoint with this common.json; None if it has none."""
    if common.get("lora") is None:
        return None
    found: LoraConfig = conform(common["lora"], LoraConfig, f"{directory / COMMON}: lora")
    return found


def has_adapters(common: Mapping[str, Any], wanted: LoraConfig | None, directory: Path) -> bool:
    """Whether the adapters that are wanted are there; False where they are to begin.

    `UserError` if there are others.
    """
    there = adapters_of(common, directory)
    if there is None:
        return wanted is None
    if wanted is None:
        raise UserError(
            f"{directory} has adapters of rank {there.rank} on {', '.join(there.targets)}: give "
            "the --lora-* flags of its run, or merge them with tools/convert_checkpoint.py --merge"
        )
    for flag, name in (("rank", "rank"), ("alpha", "alpha"), ("target-modules", "targets")):
        ours, theirs = (_text(getattr(of, name)) for of in (wanted, there))
        if ours != theirs:
            raise UserError(
                f"the adapters of {directory} have --lora-{flag} {theirs}, and this run has "
                f"{ours}: give that of the checkpoint, or begin new ones with the --load of a "
                "model without adapters"
            )
    return True


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}"
