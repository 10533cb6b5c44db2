"""Converts a checkpoint between formats; the output is complete or does not exist."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data.hub import how_to_fetch
from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig, padded_vocab_size
from paro.checkpoint.convert import hugging_face, megatron, meta, native, peft, torchtitan
from paro.checkpoint.convert.megatron_dist import is_dist
from paro.checkpoint.convert.source import ModelSource
from paro.checkpoint.directory import COMMON, TRACKER, latest_iteration
from paro.checkpoint.manifest import FOREIGN, METADATA
from paro.errors import UserError, reading
from paro.files.atomic_file import check_absent, check_folder, temporary_beside
from paro.text import size_text

OPENERS: dict[str, Callable[..., ModelSource]] = {
    "hf": hugging_face.open_hugging_face,
    "meta": meta.open_meta,
    "megatron": megatron.open_megatron,
    "torch_dist": megatron.open_megatron,
    "torchtitan": torchtitan.open_torchtitan,
    "paro": native.open_native,
}
# How a folder is recognized. This project's have a tracker like Megatron's, and DCP's metadata too.
_SIGNS: dict[str, Callable[[Path], bool]] = {
    "hf": hugging_face.is_hugging_face,
    "meta": lambda root: (root / meta.PARAMS).is_file(),
    "megatron": lambda root: (root / TRACKER).is_file() and any(root.glob("*/mp_rank_*")),
    "torch_dist": lambda root: (root / TRACKER).is_file() and any(map(is_dist, root.iterdir())),
    "torchtitan": lambda root: (
        (root / METADATA).is_file()
        and not any((root / name).is_file() for name in (COMMON, FOREIGN))
    ),
}
# The conversions that can keep the optimizer's states.
_WITH_OPTIMIZER = (("torch_dist", "paro"), ("paro", "torch_dist"))
PEFT = "peft"  # format of adapters: a source needs a base, a target needs adapters
SOURCES = (*OPENERS, PEFT)
PADDED = ("paro", "megatron", "torch_dist")  # formats whose vocabulary has rows of padding
TORCHTITAN = ("torchtitan", "torchtitan-0.2")  # by version's names; a source may have either
TARGETS = (*PADDED, "hf", *TORCHTITAN, PEFT)


def format_of(directory: Path) -> str:
    """Return which of the formats the folder of --load has; `UserError` if none."""
    for name, is_found in _SIGNS.items():
        if is_found(directory):
            return name
    if latest_iteration(directory) is not None:
        return "paro"
    raise UserError(
        f"--load {directory} holds no checkpoint: give the --save of a training, or the folder of "
        f"a model in another format{how_to_fetch(directory)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The formats, folders, dtype and vocabulary padding of a conversion."""

    source_format: str
    target_format: str
    source: Path
    target: Path
    dtype: torch.dtype | None  # dtype of the target's tensors; None: as in the source
    iteration: int | None = None  # iteration of this project's checkpoint; None: the latest
    averaged: bool = False  # whether to read averaged weights of this project's checkpoint
    base: str | None = None  # folder of the source's base, if the base has moved
    base_model: str | None = None  # name of the base in peft's adapters; None: the base's origin
    assets: Path | None = None  # folder of config.json and tokenizer, for a source without them
    with_optimizer: bool = False  # whether to convert the optimizer's states, too
    merge: bool = False  # whether adapters may be merged into the weights
    divisible_by: int  # divisor of the padded number of vocabulary rows
    padded_vocab_size: int | None = None  # padded number of vocabulary rows; None: divisible_by

    def open(self) -> ModelSource:
        """Return the model to convert, lazy, in the target dtype; `UserError` for wrong flags."""
        check_folder("--input", self.source, how_to_fetch(self.source))
        check_absent("--output", self.target)
        if self.padded_vocab_size is not None and self.target_format in ("hf", *TORCHTITAN):
            raise UserError(
                f"--padded-vocab-size {self.padded_vocab_size} needs --to paro, megatron or "
                f"torch_dist: {self.target_format} holds no padding"
            )
        if self.base_model is not None and self.target_format != PEFT:
            raise UserError(f"--base-model-name-or-path {self.base_model} needs --to peft")
        self._check_optimizer()
        options = self._options()
        if self.source_format == PEFT and self.base is None:
            raise UserError("--from peft needs --base, the folder of the model of these adapters")
        with reading(f"--input {self.source}"):
            source = (OPENERS | {PEFT: peft.open_peft})[self.source_format](self.source, **options)
        self._check_adapters(source)
        if self.target_format == PEFT:
            peft.check_base(source, self.base_model)
        self._rows(source)
        merges = bool(source.adapters) and not self.writes_adapters
        dtype = self.dtype or (torch.float32 if merges else None)
        ids, rows = _num_ids(source), source.config.vocab_size
        if ids > rows:
            pads = self.target_format in PADDED and not self.writes_adapters
            what = "get rows of zeros" if pads else "cannot be in its texts"
            note = f"the tokenizer has {ids} ids and the model {rows} rows: the others {what}"
            source = replace(source, notes=(*source.notes, note))
        return source.with_each(lambda tensor: tensor.cast(dtype))

    def _options(self) -> dict[str, Any]:
        """Return the options of the source's opener; `UserError` for flags of other formats."""
        given = {
            "iteration": (self.iteration, f"--ckpt-step {self.iteration}", ("paro",)),
            "averaged": (self.averaged or None, "--weights ema", ("paro",)),
            "assets": (self.assets, f"--hf-assets-path {self.assets}", ("torchtitan",)),
            "base": (self.base, f"--base {self.base}", ("paro", PEFT)),
            "optimizer": (self.with_optimizer or None, "--with-optimizer", ("paro", "torch_dist")),
        }
        for value, flag, formats in given.values():
            if value is not None and self.source_format not in formats:
                raise UserError(f"{flag} needs --from {' or '.join(formats)}")
        return {name: value for name, (value, *_) in given.items() if value is not None}

    def _check_optimizer(self) -> None:
        """Raise `UserError` if flags contradict --with-optimizer."""
        if not self.with_optimizer:
            return
        if (self.source_format, self.target_format) not in _WITH_OPTIMIZER:
            pairs = " or ".join(f"--from {a} --to {b}" for a, b in _WITH_OPTIMIZER)
            raise UserError(f"--with-optimizer needs {pairs}: between others it is not converted")
        if self.dtype not in (None, torch.float32):
            raise UserError("--with-optimizer keeps masters in fp32: leave --dtype out")
        if self.averaged:
            raise UserError("--with-optimizer and --weights ema contradict each other: give one")

    def _check_adapters(self, source: ModelSource) -> None:
        """Raise `UserError` if flags leave adapters out, or name adapters that are not there."""
        words = f"--input {self.source}"
        if not source.adapters:
            if self.merge or self.target_format == PEFT:
                flag = "--merge" if self.merge else "--to peft"
                raise UserError(f"{flag}: {words} has no adapters: leave it out")
            return
        if self.merge and self.target_format == PEFT:
            raise UserError("--merge and --to peft contradict each other: give one of them")
        if not self.merge and not self.writes_adapters:
            raise UserError(
                f"{words} has adapters: give --merge to write the model with them merged into its "
                "weights, or --to peft to write them alone"
            )
        if self.writes_adapters and source.lora is None:
            raise UserError(
                f"{words}: the adapters of a run have one rank and scaling, no rank above the size "
                "of a matrix, and the same modules in all layers, unlike these: give --merge and "
                f"--to {', '.join(t for t in TARGETS if t != PEFT)} to write the model with them "
                "merged into its weights"
            )

    def num_bytes(self, source: ModelSource) -> int:
        """Return the bytes of the tensors to write."""
        if self.writes_adapters:
            return sum(tensor.num_bytes for tensor in source.adapters.values())
        if source.moments and self.target_format == "torch_dist":  # with masters of its own
            return source.num_bytes + sum(tensor.num_bytes for tensor in source.tensors.values())
        if source.config.tie_embeddings_and_output_weights and self.target_format in TORCHTITAN:
            return source.num_bytes + source.tensors["embedding.weight"].num_bytes
        return source.num_bytes

    @property
    def writes_adapters(self) -> bool:
        """True if only adapters are written."""
        from_peft = self.source_format == PEFT and self.target_format == "paro"
        return self.target_format == PEFT or (from_peft and not self.merge)

    def _rows(self, source: ModelSource) -> int:
        """Return the padded number of vocabulary rows of embedding and output layer.

        Each id of the tokenizer gets a row, even if the model has fewer: trainers need the rows.
        """
        rows = max(source.config.vocab_size, _num_ids(source))
        return padded_vocab_size(rows, self.divisible_by, self.padded_vocab_size)

    def write(self, source: ModelSource, advance: Callable[[int], object]) -> list[str]:
        """Write under a temporary name, then rename; a failure leaves nothing behind.

        `advance` is called with the bytes of every chunk. Return lines to print about the result.
        """
        notes: list[str] = []
        target = self.target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < self.num_bytes(source):
            raise UserError(
                f"--output {self.target} needs {size_text(self.num_bytes(source))}, and "
                f"{size_text(free)} are free there"
            )
        source = source.with_each(lambda tensor: tensor.counted(advance))
        temporary = temporary_beside(target)
        temporary.mkdir()
        try:
            if self.target_format == PEFT:
                notes = [peft.write_peft(source, temporary, self.base_model)]
            elif self.writes_adapters:
                native.write_adapters(source, Path(str(self.base)), temporary, target)
            elif self.target_format == "hf":
                notes = hugging_face.write_hugging_face(source, temporary)
            elif self.target_format in TORCHTITAN:
                older = self.target_format == "torchtitan-0.2"
                notes = torchtitan.write_torchtitan(source, temporary, older=older)
            elif self.target_format == "paro":
                native.write_native(source, temporary, target, rows=self._rows(source))
            else:
                megatron.write_megatron(
                    source,
                    temporary,
                    rows=self._rows(source),
                    divisible_by=self.divisible_by,
                    dist=self.target_format == "torch_dist",
                )
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return notes


def _num_ids(source: ModelSource) -> int:
    """Count the ids of a source's tokenizer; 0 if it has none or one that cannot be used."""
    if source.tokenizer is None:
        return 0
    try:
        return build_tokenizer(TokenizerConfig(**source.tokenizer)).vocab_size
    except UserError:  # reported by the first program that needs a tokenizer
        return 0
