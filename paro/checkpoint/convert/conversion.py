"""Converts a checkpoint between formats; the output is complete or does not exist."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data.atomic_file import temporary_beside
from data.tokenizer import padded_vocab_size
from paro.checkpoint.convert.hugging_face import open_hugging_face, write_hugging_face
from paro.checkpoint.convert.megatron import open_megatron, write_megatron
from paro.checkpoint.convert.meta import open_meta
from paro.checkpoint.convert.native import open_native, write_native
from paro.checkpoint.convert.source import Source
from paro.errors import UserError, reading

OPENERS: dict[str, Callable[[Path], Source]] = {
    "hf": open_hugging_face,
    "meta": open_meta,
    "megatron": open_megatron,
    "paro": open_native,
}
TARGETS = ("paro", "hf", "megatron")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion: formats, folders, dtype and vocabulary padding."""

    source_format: str
    target_format: str
    source: Path
    target: Path
    dtype: torch.dtype | None  # None: as it is stored
    iteration: int | None = None  # of a checkpoint of this project; None: the latest one
    base: str | None = None  # where its base is, if it has one that moved
    merge: bool = False  # whether adapters may be merged into the weights
    divisible_by: int  # padded vocabulary rows are a multiple of this
    padded_vocab_size: int | None = None  # overrides divisible_by

    def open(self) -> Source:
        """The model to convert, lazy, in the target dtype; `UserError` for wrong flags."""
        if not self.source.is_dir():
            raise UserError(f"--input {self.source} is no folder")
        if self.target.exists() or self.target.is_symlink():
            raise UserError(f"--output {self.target} exists: remove it or give another name")
        if self.padded_vocab_size is not None and self.target_format == "hf":
            raise UserError(
                f"--padded-vocab-size {self.padded_vocab_size} needs --to paro or megatron: a "
                "Hugging Face folder holds no padding"
            )
        for flag, value in (("--ckpt-step", self.iteration), ("--base", self.base)):
            if value is not None and self.source_format != "paro":
                raise UserError(f"{flag} {value} needs --from paro")
        with reading(f"--input {self.source}"):
            if self.source_format == "paro":
                source = open_native(self.source, self.iteration, self.base)
            else:
                source = OPENERS[self.source_format](self.source)
        if source.merged is not None and not self.merge:
            raise UserError(
                f"--input {self.source} has adapters of rank {source.merged.rank}: give --merge to "
                "write the model with them merged into its weights"
            )
        if source.merged is None and self.merge:
            raise UserError(f"--merge: --input {self.source} has no adapters: leave it out")
        self._rows(source)
        tensors = {name: tensor.cast(self.dtype) for name, tensor in source.tensors.items()}
        return replace(source, tensors=tensors)

    def _rows(self, source: Source) -> int:
        """The padded number of vocabulary rows of embedding and output layer."""
        return padded_vocab_size(
            source.config.vocab_size, self.divisible_by, self.padded_vocab_size
        )

    def write(self, source: Source, advance: Callable[[int], None]) -> list[str]:
        """Writes under a temporary name, then renames; a failure leaves nothing behind.

        `advance` is called with the bytes of every piece. Returns lines to print about the result.
        """
        notes: list[str] = []
        target = self.target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < source.num_bytes:
            raise UserError(
                f"--output {self.target} needs {source.num_bytes / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free there"
            )
        temporary = temporary_beside(target)
        temporary.mkdir()
        try:
            if self.target_format == "hf":
                notes = write_hugging_face(source, temporary, advance)
            elif self.target_format == "megatron":
                rows, multiple = self._rows(source), self.divisible_by
                write_megatron(source, temporary, advance, rows=rows, divisible_by=multiple)
            else:
                write_native(source, temporary, target, advance, rows=self._rows(source))
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return notes
