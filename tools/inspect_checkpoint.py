"""Shows the contents of a checkpoint of any format: configuration, tensors, sizes, versions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed.checkpoint import TensorStorageMetadata

from paro.checkpoint.convert.conversion import OPENERS, format_of
from paro.checkpoint.convert.source import ModelSource
from paro.checkpoint.directory import common_of, find_checkpoint
from paro.checkpoint.manifest import read_manifest
from paro.checkpoint.metadata import read_metadata
from paro.distributed.user_errors import run_script
from paro.errors import reading
from paro.files.object_store import path_of
from paro.report.log import print_line
from paro.spec.states import GRAD_ERRORS, PARAM, SENT, STATE_NAMES
from tools.shared.command_line import Parser
from tools.shared.output import print_json

_WIDEST_NAME = 80

Entry = dict[str, Any]


def entry_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> Entry:
    """Describe a tensor of a checkpoint, as --json has it."""
    type_name = str(dtype).removeprefix("torch.")
    size = prod(shape) * dtype.itemsize
    return {"name": name, "shape": [*shape], "dtype": type_name, "bytes": size}


def inspect_native(directory: Path, iteration: int | None) -> tuple[dict[str, Any], list[Entry]]:
    """Return a checkpoint of this project, with the optimizer's moments."""
    folder = find_checkpoint(directory, iteration)
    entries = [
        entry_of(name, state.size, state.properties.dtype)
        for name, state in read_metadata(folder).state_dict_metadata.items()
        if isinstance(state, TensorStorageMetadata)
    ]
    return common_of(read_manifest(folder)), entries


def inspect_other(source: ModelSource) -> tuple[dict[str, Any], list[Entry]]:
    tensors = source.tensors.items()
    entries = [entry_of(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
    model = {name: value for name, value in asdict(source.config).items() if value is not None}
    return {"model": model, "tokenizer": source.tokenizer}, entries


def lines(kind: str, facts: Mapping[str, Any], entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the printed description of a checkpoint."""
    yield f"format {kind}"
    for name, value in facts.items():
        if isinstance(value, dict):
            yield name
            for inner, inner_value in value.items():
                yield f"  {inner} {inner_value}"
        else:
            yield f"{name} {value}"
    yield f"tensors ({len(entries)})"
    width = min(_WIDEST_NAME, max((len(entry["name"]) for entry in entries), default=0))
    for entry in entries:
        name, shape = entry["name"], "x".join(map(str, entry["shape"])) or "scalar"
        yield f"  {name:{width}}  {shape:>16}  {entry['dtype']:>8}  {entry['bytes']:>14,}"
    yield "totals"
    for state in dict.fromkeys(map(_state_of, entries)):
        of_it = [entry for entry in entries if _state_of(entry) == state]
        numel = sum(prod(entry["shape"]) for entry in of_it)
        yield f"  {state}: {numel:,} elements, {sum(e['bytes'] for e in of_it):,} bytes"


def verify(kind: str, directory: Path, iteration: int | None) -> str:
    """Read or measures all files that are needed; `UserError` names the first bad file."""
    if kind == "paro":
        manifest = read_manifest(find_checkpoint(directory, iteration))
        num_bytes = manifest.verify()
        return f"{len(manifest.files)} files, {num_bytes:,} bytes: sizes and checksums are right"
    source = OPENERS[kind](directory)
    for tensor in source.tensors.values():
        for start, stop in tensor.row_ranges():
            tensor.rows(start, stop)
    return f"{len(source.tensors)} tensors were read, {source.num_bytes:,} bytes"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--load", required=True, type=path_of, metavar="DIR", help="a checkpoint of any format")
    add("--ckpt-step", type=int, metavar="N", help="which iteration; default: the latest one")
    add("--verify", action="store_true", help="read every file and compare checksums")
    add("--json", action="store_true", help="print one object of JSON")
    return parser


def inspect(args: argparse.Namespace) -> None:
    kind = format_of(args.load)
    if kind == "paro":
        facts, entries = inspect_native(args.load, args.ckpt_step)
    else:
        facts, entries = inspect_other(OPENERS[kind](args.load))
    verified = verify(kind, args.load, args.ckpt_step) if args.verify else None
    if args.json:
        print_json({"format": kind, **facts, "tensors": entries, "verified": verified})
        return
    print_line(*lines(kind, facts, entries))
    if verified:
        print_line(f"verified: {verified}")


def _state_of(entry: Entry) -> str:
    """Return the state's name; other formats have only parameters."""
    state = entry["name"].partition(".")[0]
    return state if state in (*STATE_NAMES, SENT, GRAD_ERRORS) else PARAM


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    with reading(f"--load {args.load}"):
        inspect(args)


if __name__ == "__main__":
    run_script("inspect_checkpoint.py", main)
