"""Reads and writes this project's own checkpoints tensor by tensor, for conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from data.tokenizer import MERGE_FILE, VOCAB_FILE
from data.tokenizer_config import FILE_FLAGS, NULL_TYPE, saved_tokenizer, unpadded_vocab_size
from model.config import LlamaConfig, adapted_weight, is_adapter
from model.units import parameter_shapes
from paro.checkpoint.agreement import one_process
from paro.checkpoint.base import adapters_of, as_base, open_base
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.config import saved_fields
from paro.checkpoint.convert.dcp_files import write_dcp
from paro.checkpoint.convert.hugging_face import COMPANIONS, CONFIG, companions_in, tokenizer_of
from paro.checkpoint.convert.source import LazyTensor, ModelSource, checked_tensors, with_vocabulary
from paro.checkpoint.directory import (
    COMMON,
    begin_checkpoint,
    common_of,
    find_checkpoint,
    finish_checkpoint,
)
from paro.checkpoint.manifest import Manifest, read_manifest
from paro.checkpoint.storage import CheckedReader
from paro.errors import UserError, about
from paro.files.schema import conform
from paro.layout import Shape
from paro.spec.states import EMA, MOMENTS, PARAM

# Fields of common.json that say how far a run has come.
_PROGRESS = ("num_optimizer_steps", "state", "schedule", "global_batch_size")


def open_native(
    root: Path,
    iteration: int | None = None,
    base: str | None = None,
    *,
    averaged: bool = False,
    optimizer: bool = False,
) -> ModelSource:
    """Open a checkpoint of a run or of a conversion; `UserError` says what is wrong.

    Frozen parameters are read from the checkpoint's base (in the folder `base`, if it has moved),
    and adapters are merged into them. With `averaged`, averages of trainable ones are read.
    With `optimizer` AdamW's moments are read, too, and the rows of padding stay.
    """
    directory = find_checkpoint(root, iteration)
    manifest = read_manifest(directory)
    common = common_of(manifest)
    tensors = tensors_in(manifest)
    if averaged:
        averages = tensors_in(manifest, EMA)
        if not (averages and common.get("num_averaged")):
            raise UserError(f"--weights ema: {directory} has no averaged weights (--ema-decay)")
        tensors |= averages
    origin = common.get("converted_from")
    under = open_base(common.get("base"), base, f"{directory}")
    if under is not None:
        is_whole = all(map(is_adapter, tensors))
        origin = common_of(under).get("converted_from") if is_whole else None
        tensors = tensors_in(under) | tensors
    source = source_of(common, tensors, directory, root, keeps_padding=optimizer)
    source = replace(source, origin=origin)
    return _with_optimizer(source, common, manifest) if optimizer else source


def source_of(
    common: Mapping[str, Any],
    stored: Mapping[str, LazyTensor],
    directory: Path,
    root: Path,
    *,
    keeps_padding: bool = False,
) -> ModelSource:
    """Return the source of the tensors that a common.json describes, adapters merged.

    `directory` names the checkpoint in errors; companions of a converted model are under `root`.
    """
    lora = adapters_of(common, directory)
    fields: dict[str, Any] = {"max_position_embeddings": 2048}
    apart = ("max_position_embeddings", "init_method_std")
    fields |= {name: common[name] for name in apart if name in common} | common.get("model", {})
    config = replace(conform(fields, LlamaConfig, f"{directory / COMMON}: model"), lora=lora)
    tensors = checked_tensors(parameter_shapes(config), stored, directory)
    adapters = {name: tensors.pop(name) for name in list(tensors) if is_adapter(name)}
    vocab_size = config.vocab_size
    if not keeps_padding:
        vocab_size = unpadded_vocab_size(common) or vocab_size
    trained = (common.get("tokenizer") or {}).get("tokenizer_type")
    begins = bool(common.get("begins_with_bos", trained == "Llama2Tokenizer"))
    companions, tokenizer, notes = _companions(root, common, begins=begins)
    source = ModelSource(
        config=replace(config, vocab_size=vocab_size, lora=None),
        tensors=with_vocabulary(tensors, vocab_size),
        companions=companions,
        tokenizer=tokenizer,
        begins_with_bos=begins,
        token_ids=common.get("token_ids", {}),
        notes=notes,
    )
    if lora is None:
        return source
    scalings = dict.fromkeys(map(adapted_weight, adapters), lora.scaling)
    return source.with_adapters(lora, adapters, scalings)


def _with_optimizer(
    source: ModelSource, common: Mapping[str, Any], manifest: Manifest
) -> ModelSource:
    """Return the source with AdamW's moments and the run's progress; `UserError` without them."""
    moments = {kind: tensors_in(manifest, kind) for kind in MOMENTS}
    progress = {name: common.get(name) for name in _PROGRESS} | {"arguments": manifest.arguments}
    is_adamw = all(of_kind.keys() == source.tensors.keys() for of_kind in moments.values())
    if is_adamw and not common.get("schedule"):
        raise UserError(
            f"--with-optimizer: {manifest.directory} is converted and no run has continued from "
            "it: convert what it was converted from"
        )
    if not is_adamw or common.get("groups_alone"):
        raise UserError(
            f"--with-optimizer: {manifest.directory} has no moments of AdamW of all parameters, "
            "equal on all ranks: leave the flag out"
        )
    by_group = ("decoupled_lr", "param_group", "use_mup")
    if any(map(manifest.arguments.get, by_group)):
        raise UserError(
            f"--with-optimizer: {manifest.directory} is of a run with --decoupled-lr, "
            "--param-group or --use-mup, whose groups of parameters are not converted: leave the "
            "flag out"
        )
    shapes = parameter_shapes(source.config)
    checked = {
        kind: checked_tensors(shapes, moments[kind], manifest.directory, f"{kind}.{{}}".format)
        for kind in MOMENTS
    }
    return replace(source, moments=checked, progress=progress)


def tensors_in(manifest: Manifest, kind: str = PARAM) -> dict[str, LazyTensor]:
    """Return the parameters in an iteration's folder, or another state of them, by name."""
    manifest.check_sizes(manifest.files)
    reader = CheckedReader(manifest)
    return {
        name.removeprefix(f"{kind}."): LazyTensor(
            shape=tuple(state.size),
            dtype=state.properties.dtype,
            rows=partial(_read_rows, reader, name, state),
            name=f"{reader.directory}: {name.removeprefix(f'{PARAM}.')}",
        )
        for name, state in reader.metadata.state_dict_metadata.items()
        if isinstance(state, TensorStorageMetadata) and name.startswith(f"{kind}.")
    }


def write_native(source: ModelSource, root: Path, final: Path, *, rows: int) -> None:
    """Fill an empty folder, later renamed to `final`, with a checkpoint of the parameters.

    With moments it is one that a run continues from. Embedding and output layer get `rows` rows;
    padding rows are zero, as their ids never occur.
    """
    tokenizer = _tokenizer_there(source, final / COMPANIONS)
    common = {
        "model": saved_fields(replace(source.config, vocab_size=rows)),
        "max_position_embeddings": source.config.max_position_embeddings,
        "init_method_std": source.config.init_method_std,
        "vocab_size": tokenizer["vocab_size"] or source.config.vocab_size,
        "unpadded_vocab_size": source.config.vocab_size,
        "tokenizer": tokenizer,
        "begins_with_bos": source.begins_with_bos,
        "converted_from": None if source.adapters else source.origin,
        "token_ids": source.token_ids,
    }
    kinds = {PARAM: source.tensors, **source.moments}
    states = {kind: with_vocabulary(tensors, rows) for kind, tensors in kinds.items()}
    _write(states, root, final, {**common, **source.progress})
    source.copy_companions(root / COMPANIONS)


def write_adapters(source: ModelSource, base: Path, root: Path, final: Path) -> None:
    """Fill an empty folder, later renamed to `final`, with a source's adapters on a `base`."""
    assert source.lora is not None, "no adapters"
    with about("--base "):
        under = find_checkpoint(base)
    manifest = read_manifest(under)
    named, common = as_base(manifest), common_of(manifest)
    if common.get("base") is not None or common.get("lora") is not None:
        raise UserError(
            f"--base {base}: the base of adapters must be complete and without adapters: convert "
            "it to paro, with --merge if it has adapters"
        )
    copied = ("model", "max_position_embeddings", "init_method_std", "vocab_size", "tokenizer")
    more = ("unpadded_vocab_size", "begins_with_bos", "token_ids")
    fields = {name: common[name] for name in (*copied, *more) if name in common}
    fields |= {"lora": asdict(source.lora), "base": named}
    _write({PARAM: source.adapters}, root, final, fields)


def _write(
    states: Mapping[str, Mapping[str, LazyTensor]], root: Path, final: Path, common: dict[str, Any]
) -> None:
    """Write states by their kind as the latest iteration of a folder, later renamed to `final`."""
    named: dict[str, dict[Shape, LazyTensor]] = {
        f"{kind}.{name}": {(): tensor}
        for kind, tensors in states.items()
        for name, tensor in tensors.items()
    }
    iteration = common.get("state", {}).get("iteration", 0)
    directory = begin_checkpoint(root, iteration)
    sums = write_dcp(directory, named, f"--output {final}")
    is_alone = states.keys() == {PARAM}
    finish_checkpoint(directory, iteration, {**common, "parameters_only": is_alone}, sums)


def _read_rows(
    reader: CheckedReader, name: str, stored: TensorStorageMetadata, start: int, stop: int
) -> Tensor:
    columns = stored.size[1:]
    rows = torch.empty((stop - start, *columns), dtype=stored.properties.dtype)
    corner = (start, *(0 for _ in columns))
    state = ChunkedState(shape=tuple(stored.size), chunks={corner: rows})
    with one_process().raise_on_all_ranks(f"{reader.directory}"):
        reader.read(reader.plan([(name, state)]))
    return rows


def _companions(
    root: Path, common: Mapping[str, Any], *, begins: bool
) -> tuple[dict[str, Path], dict[str, Any] | None, tuple[str, ...]]:
    """Return the tokenizer and config files, the tokenizer's configuration, and lines to print."""
    converted = companions_in(root / COMPANIONS)
    if converted:
        return converted, tokenizer_of(converted, begins=begins), ()
    saved = saved_tokenizer(common)
    places = [*filter(None, map(saved.get, ("tokenizer_model", "vocab_file", "merge_file")))]
    if not places:
        return {}, saved or None, (f"{root} has no tokenizer: prompts are token ids",)
    paths = [*map(Path, places)]
    if saved["tokenizer_type"] == "HuggingFaceTokenizer":
        files = companions_in(paths[0] if paths[0].is_dir() else paths[0].parent)
        files.pop(CONFIG, None)
    else:
        called = ("tokenizer.model",) if len(paths) == 1 else (VOCAB_FILE, MERGE_FILE)
        files = dict(zip(called, paths, strict=True)) if all(map(Path.is_file, paths)) else {}
    gone = f"the tokenizer is no longer at {' and '.join(places)}: converted without it"
    return files, saved, () if files else (gone,)


def _tokenizer_there(source: ModelSource, folder: Path) -> dict[str, Any]:
    """Return the tokenizer for the checkpoint's common.json: the copy in `folder`, or token ids."""
    copies = {path.parent: folder for path in source.companions.values()}
    copies |= {path: folder / name for name, path in source.companions.items()}
    fields = dict(source.tokenizer or {})
    places = {name: copies.get(Path(fields[name])) for name in FILE_FLAGS if fields.get(name)}
    if places and None not in places.values():
        return {**fields, "vocab_size": None, **{name: str(at) for name, at in places.items()}}
    if fields.get("tokenizer_type") == NULL_TYPE:
        return fields
    null = {"tokenizer_type": NULL_TYPE, "tokenizer_model": None}
    return {**null, "vocab_size": source.config.vocab_size}
