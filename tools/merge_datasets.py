"""Joins the indexed data sets of a folder into one, in the order of their names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.fingerprint import Fingerprint, read_fingerprint
from data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from paro.distributed.user_errors import run_script
from paro.errors import UserError, reading
from paro.files.atomic_file import check_folder
from paro.report.log import print_line
from tools.shared.command_line import Parser


def prefixes_in(folder: Path) -> list[Path]:
    """Return the data sets of a folder by name; `UserError` if a file has no partner."""
    check_folder("--input", folder, ": give one that holds data sets")
    with reading(f"--input {folder}"):
        files = [path for path in folder.iterdir() if path.suffix in (".bin", ".idx")]
    prefixes = sorted({path.with_suffix("") for path in files}, key=lambda path: path.name)
    if not prefixes:
        raise UserError(f"--input {folder} holds no data set, which is a .bin and a .idx file")
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise UserError(
                    f"{path} is missing, the other file of its data set exists: write both again, "
                    f"or take the other out of --input {folder}"
                )
    return prefixes


def merge(prefixes: Sequence[Path], output_prefix: str) -> str:
    """Write all documents of the data sets into one; return a line of summary."""
    targets = {bin_path(output_prefix).absolute(), idx_path(output_prefix).absolute()}
    for prefix in prefixes:
        if bin_path(prefix).absolute() in targets:
            raise UserError(
                f"--output-prefix {output_prefix} is one of the data sets to be joined: give "
                "another, best outside --input"
            )
    first, made_with = IndexedDataset(prefixes[0]), tokenizer_of(prefixes)
    has_loss_mask = first.loss_mask_file is not None
    with IndexedDatasetWriter(
        output_prefix, first.dtype, made_with, has_loss_mask=has_loss_mask
    ) as writer:
        for prefix in prefixes:
            writer.add_dataset(IndexedDataset(prefix))
    return (
        f"wrote {bin_path(output_prefix)} and .idx: {writer.num_documents:,} documents, "
        f"{writer.num_tokens:,} tokens of {len(prefixes)} data sets; made with "
        + (made_with.describe() if made_with else "an unknown tokenizer: not all of them say")
    )


def tokenizer_of(prefixes: Sequence[Path]) -> Fingerprint | None:
    """Return the tokenizer that made all corpora, or None if one records none.

    Older data sets do not say what its ids stand for; if one of them does, it holds for all.
    """
    fingerprints = {prefix: read_fingerprint(prefix) for prefix in prefixes}
    known = {prefix: fingerprint for prefix, fingerprint in fingerprints.items() if fingerprint}
    first = next(iter(known.items()), None)
    for prefix, fingerprint in known.items():
        if first is not None and fingerprint.digest != first[1].digest:
            raise UserError(
                f"{bin_path(first[0])} was made with {first[1].describe()}, and {bin_path(prefix)} "
                f"with {fingerprint.describe()}: only data sets of one tokenizer can be joined"
            )
    if first is None or len(known) < len(fingerprints):
        return None
    return next((one for one in known.values() if one.token_bytes is not None), first[1])


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Joins all data sets (.bin and .idx) of a folder, sorted by name, into "
            "PREFIX.bin and PREFIX.idx. They have to be of one tokenizer."
        ),
    )
    parser.add_argument("--input", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    print_line(merge(prefixes_in(args.input), args.output_prefix))


if __name__ == "__main__":
    run_script("merge_datasets.py", main)
