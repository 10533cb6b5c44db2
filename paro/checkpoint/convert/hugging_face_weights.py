"""Finds the tensors of a model in a Hugging Face folder: in which file, and under which name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from model.config import LlamaConfig
from model.hugging_face import hugging_face_name
from model.units import parameter_shapes
from paro.checkpoint.convert.safetensors_file import open_safetensors
from paro.checkpoint.convert.source import LazyTensor, checked_tensors
from paro.errors import UserError
from paro.untrusted.schema import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Parts of names that modules around a model, or around its blocks, put there: transformers' own
# `model`, and those of DataParallel, torch.compile, FSDP and activation checkpointing.
_AROUND = {"model", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_BUFFER = "rotary_emb.inv_freq"  # buffer that older versions stored; it follows from RoPE fields


class _Index(TypedDict):
    weight_map: dict[str, str]


def find_tensors(
    directory: Path, config: LlamaConfig, output_biases: Sequence[str]
) -> tuple[LlamaConfig, dict[str, LazyTensor], list[str]]:
    """Return the model, its tensors under this project's names, and lines to print about them.

    If config.json ties the output layer but the files have an output layer with other values, the
    model is not tied. `output_biases` are names of tensors that may be present if they are zero.
    `UserError` names the file or tensor that is wrong.
    """
    stored, notes = _stored_tensors(directory)
    untied = replace(config, tie_embeddings_and_output_weights=False)
    names = {name: hugging_face_name(name) for name in parameter_shapes(untied)}
    known = {_core(theirs): theirs for theirs in (*names.values(), *output_biases)}
    called: dict[str, str] = {}  # {name in transformers: name in the files}
    for there in stored:
        theirs = known.get(_core(there))
        if theirs is None:
            if there.endswith(_BUFFER):
                continue
            raise UserError(f"{directory} has {there}, which this model has not")
        if theirs in called:
            raise UserError(f"{directory} has {called[theirs]} and {there}: both are {theirs}")
        called[theirs] = there
    found = {name: stored[called[theirs]] for name, theirs in names.items() if theirs in called}
    for theirs in output_biases:
        if theirs in called and not _is_zero(stored[called[theirs]], config.hidden_size):
            raise UserError(
                f"{directory}: {called[theirs]} is not zero, and this model has no bias on the "
                "output projection of attention"
            )
    if config.tie_embeddings_and_output_weights and "head.weight" in found:
        head = found.pop("head.weight")
        if not _are_equal(found.setdefault("embedding.weight", head), head):
            notes.append(
                f"{directory} says tie_word_embeddings, and stores another {names['head.weight']}: "
                "the output layer is not tied"
            )
            config, found["head.weight"] = untied, head
    return config, checked_tensors(config, found, directory, names), notes


def _stored_tensors(directory: Path) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return all tensors by their names in the files, and lines to print about them."""
    has_index = (directory / INDEX).is_file()
    if (directory / WEIGHTS).is_file():
        unread = f"{directory} has {WEIGHTS} too, which transformers reads: {INDEX} is not read"
        return open_safetensors(directory / WEIGHTS), [unread] if has_index else []
    if not has_index:
        raise UserError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}: other files of weights may hold "
            "programs; have transformers save it with safe_serialization"
        )
    index: _Index = read_json(directory / INDEX, _Index)
    places = index["weight_map"]
    if any(Path(file).name != file for file in places.values()):
        raise UserError(f"{directory / INDEX} is damaged (it names files elsewhere)")
    files = {file: open_safetensors(directory / file) for file in sorted({*places.values()})}
    stored = {name: tensor for file in files.values() for name, tensor in file.items()}
    for name, file in places.items():  # the index decides if several files have a tensor
        if name not in files[file]:
            raise UserError(f"{directory / file} has no {name}, which {INDEX} says it has")
        stored[name] = files[file][name]
    return stored, []


def _core(name: str) -> str:
    """Return a tensor's name without the prefixes of wrapping modules."""
    return ".".join(part for part in name.split(".") if part not in _AROUND)


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or not one.shape:
        return False
    return all(bool((one.rows(*rows) == other.rows(*rows)).all()) for rows in one.row_ranges())


def _is_zero(vector: LazyTensor, size: int) -> bool:
    return vector.shape == (size,) and not bool(vector.rows(0, size).any())
