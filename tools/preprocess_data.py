"""Turns text into Megatron's indexed data sets: `<prefix>_<key>_document.bin` and `.idx`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.corpus import RawDocument, check_inputs, parse, raw_documents
from data.indexed_dataset import IndexedDatasetWriter, bin_path, dtype_for_vocab
from data.tokenizer import TOKENIZER_TYPES, TokenizerConfig, build_tokenizer

DOCUMENTS_PER_TASK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingPlan:
    """What a worker process needs to know."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool


class Encoded(NamedTuple):
    """One document: per key, in the order of the plan, its sequences as token ids."""

    sequences: tuple[list[NDArray[Any]], ...]
    num_bytes: int


tokenizer_of = cache(build_tokenizer)  # one per process


def encode(plan: EncodingPlan, document: RawDocument) -> Encoded:
    """The ids of a document; an empty text has none, and no end of document either."""
    tokenizer = tokenizer_of(plan.tokenizer)
    dtype = dtype_for_vocab(tokenizer.vocab_size)
    encoded = []
    for texts in parse(document, plan.keys).values():
        try:
            sequences = [ids for ids in map(tokenizer.encode, texts) if ids]
        except ValueError as error:
            raise ValueError(f"{document.place}: {error}") from error
        if sequences and plan.append_eod:
            sequences[-1].append(tokenizer.eod)
        encoded.append([np.array(ids, dtype=dtype) for ids in sequences])
    return Encoded(tuple(encoded), len(document.content))


@contextmanager
def ordered_map(workers: int) -> Iterator[Callable[..., Iterable[Encoded]]]:
    """`map` over this many processes, results in order; over this process if it is one."""
    if workers == 1:
        yield map
        return
    # Started afresh, not forked: tokenizer libraries keep threads that do not survive a fork.
    ignore_ctrl_c = (signal.SIGINT, signal.SIG_IGN)  # this process ends the others
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, signal.signal, ignore_ctrl_c) as pool:
        yield partial(pool.imap, chunksize=DOCUMENTS_PER_TASK)


class Progress:
    """Prints documents and bytes per second to standard error every `interval` documents."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.begin = time.perf_counter()
        self.num_documents = 0
        self.num_bytes = 0

    def count(self, num_bytes: int) -> None:
        self.num_documents += 1
        self.num_bytes += num_bytes
        if self.num_documents % self.interval == 0:
            self.print()

    def print(self) -> None:
        seconds = max(time.perf_counter() - self.begin, 1e-9)
        print(
            f"Processed {self.num_documents} documents ({self.num_documents / seconds:.1f} "
            f"docs/s, {self.num_bytes / seconds / 2**20:.2f} MB/s).",
            file=sys.stderr,
        )


def preprocess(
    paths: Sequence[Path],
    output_prefix: str,
    plan: EncodingPlan,
    *,
    workers: int,
    log_interval: int,
) -> list[str]:
    """Write one data set per key, all or none; returns a line on each."""
    dtype = dtype_for_vocab(tokenizer_of(plan.tokenizer).vocab_size)
    prefixes = [f"{output_prefix}_{key}_document" for key in plan.keys]
    progress = Progress(log_interval)
    with ExitStack() as files:
        writers = [files.enter_context(IndexedDatasetWriter(name, dtype)) for name in prefixes]
        documents = files.enter_context(ordered_map(workers))(
            partial(encode, plan), raw_documents(paths)
        )
        for document in documents:
            for writer, sequences in zip(writers, document.sequences, strict=True):
                writer.add_document(sequences)
            progress.count(document.num_bytes)
        for key, writer in zip(plan.keys, writers, strict=True):
            if writer.num_tokens == 0:
                raise ValueError(
                    f"--input {' '.join(map(str, paths))} holds no text under the key {key!r}"
                )
    progress.print()
    return [
        f"wrote {bin_path(writer.prefix)} and .idx: {writer.num_documents:,} documents, "
        f"{writer.num_tokens:,} tokens as {writer.dtype.name}"
        for writer in writers
    ]


def add_input_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input data")
    group.add_argument(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl: one JSON object per line is one document; .txt: each file is one document",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the JSON objects to read, one data set each; a value is a text or a list "
        "of sentences (default: text)",
    )
    group = parser.add_argument_group("tokenization process")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, required=True)
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="SentencePiece .model file, tokenizer.json, or folder of a transformers tokenizer",
    )
    group.add_argument("--vocab-size", type=int, help="for NullTokenizer: texts are ids below it")
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end each document with the end-of-document token, as pre-training wants it",
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(
            "Tokenizes text and writes it in Megatron-LM's format, PREFIX_KEY_document.bin and "
            ".idx. Give the training --data-path PREFIX_KEY_document, without .bin or .idx."
        ),
        epilog=(
            "example: python tools/preprocess_data.py --input books.jsonl --output-prefix books "
            "--append-eod --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model"
        ),
        allow_abbrev=False,
    )
    add_input_args(parser)
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX")
    group = parser.add_argument_group("runtime")
    group.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes to tokenize with (default: one per core)",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between progress lines (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    for flag, value in (("--workers", args.workers), ("--log-interval", args.log_interval)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    check_inputs(args.input)
    tokenizer = TokenizerConfig(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
    )
    plan = EncodingPlan(
        tokenizer=tokenizer,
        keys=tuple(dict.fromkeys(args.json_keys)),
        append_eod=args.append_eod,
    )
    lines = preprocess(
        args.input, args.output_prefix, plan, workers=args.workers, log_interval=args.log_interval
    )
    print("\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except (OSError, ValueError) as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
