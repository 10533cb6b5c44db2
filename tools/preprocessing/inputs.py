"""The flags for the text to read, for every tool that reads text."""

from __future__ import annotations

import argparse

from data.sources import SourceChunk, find_chunks


def add_source_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help=".jsonl: one JSON object per line is one document; .txt: each file is one document; "
        "both also as .gz or .zst; .parquet: each row is one document; a folder or a pattern "
        "('data/*.jsonl') of such files; a Hugging Face data set: a folder that save_to_disk "
        "wrote, or its name",
    )
    group.add_argument(
        "--dataset-split",
        default="train",
        metavar="NAME",
        help="which split of a Hugging Face data set (default: %(default)s)",
    )
    group.add_argument(
        "--dataset-config", metavar="NAME", help="which configuration of one, where it has several"
    )


def chunks_of(args: argparse.Namespace) -> list[SourceChunk]:
    """Return the chunks that --input names; `UserError` for an input without text."""
    return find_chunks(args.input, config=args.dataset_config, split=args.dataset_split)
