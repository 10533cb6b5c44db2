"""Loads a checkpoint into shards of any strategy and world size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from model.config import LlamaConfig, LoraConfig, is_adapter
from paro.checkpoint.agreement import CheckpointRanks, with_one_folder
from paro.checkpoint.base import has_adapters, open_base
from paro.checkpoint.chunks import ChunkedState, begin_without, chunked_states, may_be_missing
from paro.checkpoint.config import SavedRun, as_read, find_saved, is_of_positions, read_saved
from paro.checkpoint.directory import candidates
from paro.checkpoint.storage import CheckedReader
from paro.distributed.control import Control
from paro.errors import UserError, about, flag_of
from paro.files.object_store import path_of
from paro.layout import shape_text
from paro.spec.states import (
    ANCHOR,
    BEGUN,
    EMA,
    GRAD_ERRORS,
    MASTER_OF_GROUP,
    PARAM,
    SENT,
    FlatShard,
    is_of_group,
)

State = TypeVar("State")
_MISMATCH = "the checkpoint does not match the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The checkpoint to load, and the parts of it that are loaded."""

    iteration: int | None = None  # iteration to load; None: the latest complete checkpoint
    moments: bool = True  # whether to load the optimizer's moments
    model: Mapping[str, Any] | None = None  # model fields that must equal `common["model"]`
    base: str | None = None  # folder of the base, if the base has moved
    lora: LoraConfig | None = None  # the model's adapters, which a checkpoint of a base lacks
    groups_alone: Mapping[str, int] | None = None  # groups that train alone, and their schedule
    as_sent: bool = False  # whether to load `sent` states as parameters instead of the masters


def load_checkpoint(
    root: str | Path,
    shards: Iterable[FlatShard],
    control: Control,
    *,
    request: LoadRequest = LoadRequest(),
    log: Callable[[str], None],
) -> SavedRun | None:
    """Fill `shards` in place; return the checkpoint that was loaded, None if nothing was saved.

    Collective; `log` is called on every rank. Every rank passes a shard of every unit and of each
    wanted state; other states are not read. Moments that a converted model lacks become zero. A
    checkpoint that any rank finds incomplete or damaged is logged and skipped, unless
    `request.iteration` names it. A `UserError` is raised on all ranks; shards are then unchanged
    unless a file turned out to be damaged while it was read.
    """
    ranks = with_one_folder(control)
    states = chunked_states(shards)
    if not request.moments:
        states = _parameters(states)
    load = partial(_load_iteration, states=states, request=request, ranks=ranks, log=log)
    order = partial(_order, ranks=ranks)
    with about(f"--load {root}: "):
        saved = find_saved(path_of(root), request.iteration, order=order, read=load, log=log)
    if saved is not None:
        log(f"  successfully loaded checkpoint from {root} at iteration {saved.manifest.iteration}")
    return saved


def _order(root: Path, ranks: CheckpointRanks) -> tuple[list[int], str | None]:
    """Return the iterations that all ranks try, best first, and the tracker's fault or None.

    All ranks use rank 0's order: otherwise they could resume from different iterations. Raises
    `UserError` if other ranks see checkpoints and rank 0 does not.
    """
    with ranks.raise_on_all_ranks(name_rank=False):
        mine = candidates(root)
    everyone = ranks.everyone.gather(mine)
    if any(order for order, _ in everyone) and not everyone[0][0]:
        rank = next(rank for rank, (order, _) in enumerate(everyone) if order)
        raise UserError(
            f"rank 0 sees no checkpoint there and rank {rank} sees iteration "
            f"{everyone[rank][0][0]}: bring the missing part to the node of rank 0"
        )
    return everyone[0]


def _load_iteration(
    root: Path,
    iteration: int,
    *,
    states: dict[str, ChunkedState],
    request: LoadRequest,
    ranks: CheckpointRanks,
    log: Callable[[str], None],
) -> SavedRun:
    """Fill the states from one iteration, after every rank has found all chunks it needs."""
    with ranks.raise_on_all_ranks():
        saved = read_saved(root, iteration, sizes=ranks.is_first_of_folder)
        common, directory = saved.common, saved.manifest.directory
        _check_model(common.get("model", {}), request.model or {})
        reader = CheckedReader(saved.manifest)
        stored = reader.metadata.state_dict_metadata
        present = _parameters(states) if common.get("parameters_only") else states
        if not has_adapters(common, request.lora, directory):
            # Adapters keep their initial values; no other parameters have moments.
            present = {n: state for n, state in _parameters(states).items() if not is_adapter(n)}
        if request.groups_alone is None or common.get("groups_alone") != request.groups_alone:
            stored = {name: stored[name] for name in stored if not is_of_group(name)}
        present = {
            name: state
            for name, state in present.items()
            if not may_be_missing(name)
            or getattr(stored.get(name), "size", None) == torch.Size(state.shape)
        }
        if common.get("has_moments") is False and len(_parameters(present)) < len(present):
            raise UserError(
                f"{directory} was saved with --no-save-optim: give --no-load-optim or --finetune"
            )
        read_from = {name: _source(name, stored, request) for name in present}
        stored = stored | {n: stored[source] for n, source in read_from.items() if source in stored}
        readers = [(reader, [name for name in present if name in stored])]
        base = open_base(common.get("base"), request.base, f"{directory}")
        if base is None:
            _check_states(present, stored)
        else:
            of_base = CheckedReader(base)
            _check_states(present, _parameters(of_base.metadata.state_dict_metadata) | stored)
            readers.append((of_base, [name for name in present if name not in stored]))
        plans = [
            (each, each.plan((read_from[name], present[name]) for name in names))
            for each, names in readers
        ]
    # Shards are overwritten only now, after the checks have passed on every rank.
    with ranks.raise_on_all_ranks():
        for reader, plan in plans:
            reader.read(plan)
    missing = states.keys() - present.keys()
    begin_without(states, missing)
    for line in _notes(states, missing, stored if request.moments else _parameters(stored)):
        log(line)
    return saved


def _notes(
    states: Mapping[str, ChunkedState], missing: Collection[str], stored: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each kind of states that is converted, or is only here or only stored."""
    converted = {
        (name.partition(".")[0], stored[name].properties.dtype, states[name].dtype)
        for name in states.keys() & stored.keys() - missing
    }
    for kind, before, now in converted:
        if kind not in (PARAM, SENT) and before != now:
            types = f"{before} in the checkpoint and {now} now".replace("torch.", "")
            yield f"  {kind} is {types}: converted"
    here, without, there = (
        {name.partition(".")[0] for name in names} for names in (states, missing, stored)
    )
    if GRAD_ERRORS in without:
        yield "  error feedback of gradients begins anew: none was saved by such ranks and strategy"
    if EMA in here and EMA not in there:
        yield "  averaged weights begin anew: the checkpoint has none"
    if EMA in there and EMA not in here:
        yield "  the checkpoint's averaged weights are left behind: there is no --ema-decay"


def _parameters(states: dict[str, State]) -> dict[str, State]:
    kinds = (f"{PARAM}.", f"{SENT}.", f"{ANCHOR}.", f"{MASTER_OF_GROUP}@", f"{BEGUN}@")
    return {name: state for name, state in states.items() if name.startswith(kinds)}


def _source(name: str, stored: Mapping[str, object], request: LoadRequest) -> str:
    """Return the name of the checkpoint's state that holds the values of the state `name`.

    Groups of ranks that do not continue as they were all begin with the parameters on which groups
    agreed, and with the moments that the checkpoint has for all.
    """
    kind, _, parameter = name.partition(".")
    sent = f"{SENT}.{parameter}"
    if kind == PARAM and request.as_sent and sent in stored:
        return sent
    if name in stored or not is_of_group(name):
        return name
    plain = kind.partition("@")[0]
    return f"{PARAM if plain in (MASTER_OF_GROUP, ANCHOR) else plain}.{parameter}"


def _check_states(states: dict[str, ChunkedState], saved: Mapping[str, object]) -> None:
    """Raise `UserError` unless a checkpoint has exactly the model's parameters and `states`."""
    for name, state in states.items():
        kind, _, parameter = name.partition(".")
        if name not in saved:
            if kind != PARAM and f"{PARAM}.{parameter}" in saved:
                raise UserError(
                    f"the checkpoint has no {kind} of {parameter}: it did not train there, or by "
                    "another --optimizer: give the --trainable and --optimizer of that run, or "
                    "--no-load-optim or --finetune"
                )
            what = parameter if kind == PARAM else f"{kind} of {parameter}"
            raise UserError(f"{_MISMATCH}: only the model has {what}")
        there = getattr(saved[name], "size", None)
        if there is None or tuple(there) != state.shape:
            stored_shape = "no tensor" if there is None else shape_text(there)
            raise UserError(
                f"{_MISMATCH}: {name} is {stored_shape} there and {shape_text(state.shape)} here"
            )
    for name in saved:
        kind, _, parameter = name.partition(".")
        if kind == PARAM and name not in states:
            raise UserError(f"{_MISMATCH}: only the checkpoint has {parameter}")


def _check_model(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first field that differs, even if all shapes are equal.

    Shapes do not distinguish 8 heads of 16 channels from 4 heads of 32 channels.
    """
    there = as_read(there, LlamaConfig) if there else {}
    for name, value in as_read(here).items():
        if name in there and there[name] != value:
            text = f"{_MISMATCH}: {name} is {there[name]} there and {value} here"
            if name == "vocab_size":  # padded rows; no tokenizer flag has their number
                text += f": give --padded-vocab-size {there[name]}, or --use-checkpoint-args"
            if is_of_positions(name):
                flag = flag_of(name)
                text += f": with --finetune and {flag} training begins with the parameters there"
            raise UserError(text)
