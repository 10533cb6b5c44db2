"""The base and the adapters of a checkpoint that holds only trained parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.config import LoraConfig
from paro.checkpoint.directory import COMMON, BaseCheckpoint, find_checkpoint
from paro.checkpoint.manifest import DamagedError, Manifest, read_manifest
from paro.errors import UserError
from paro.files.object_store import path_of
from paro.files.schema import conform
from paro.spec.states import PARAM


def as_base(manifest: Manifest) -> BaseCheckpoint:
    """Return the checkpoint of a manifest as a base."""
    return BaseCheckpoint(
        folder=str(manifest.directory.parent.resolve()),
        iteration=manifest.iteration,
        checksum=manifest.checksum,
    )


def stored_parameters(directory: Path) -> frozenset[str]:
    """Return the parameters stored in an iteration's folder itself, not in its base."""
    # Imported here because the import of DCP takes half a second.
    from paro.checkpoint.metadata import read_metadata

    names = read_metadata(directory).state_dict_metadata
    return frozenset(name.removeprefix(f"{PARAM}.") for name in names if name.startswith(PARAM))


def open_base(named: BaseCheckpoint | None, moved_to: str | None, blame: str) -> Manifest | None:
    """Return the manifest of a checkpoint's base; None if it needs no base.

    `moved_to` is the value of --base, and `blame` names the checkpoint in errors. `UserError` if
    the base is gone, damaged or another checkpoint than before.
    """
    if named is None:
        if moved_to is not None:
            raise UserError(f"--base {moved_to}: {blame} needs no base: leave --base out")
        return None
    root = named["folder"] if moved_to is None else moved_to
    what = f"{root}, iteration {named['iteration']}, the base of {blame}"
    try:
        manifest = read_manifest(find_checkpoint(path_of(root), named["iteration"]))
    except DamagedError as error:
        where = "give --base DIR where it is now" if moved_to is None else "give another --base"
        raise UserError(f"{what}, cannot be read ({error}): {where}") from None
    if manifest.checksum != named["checksum"]:
        raise UserError(
            f"{what}, has changed since, and what was trained belongs to the old one: restore it, "
            "or give --base DIR where that is"
        )
    return manifest


def adapters_of(common: Mapping[str, Any], directory: Path) -> LoraConfig | None:
    """Return the adapters of a checkpoint with this common.json; None if it has none."""
    return conform(common.get("lora"), LoraConfig | None, f"{directory / COMMON}: lora")


def has_adapters(common: Mapping[str, Any], wanted: LoraConfig | None, directory: Path) -> bool:
    """Return whether a checkpoint has the wanted adapters; False if it has no adapters yet.

    `UserError` if the checkpoint has other adapters.
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
