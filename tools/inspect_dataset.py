"""Shows the contents of a data set: counts, lengths, texts, and samples of a training."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.blend import parse_blend, read_blend, read_blend_per_split, read_phases
from data.fingerprint import Fingerprint, fingerprint_of, read_fingerprint
from data.indexed_dataset import IndexedDataset
from data.tokenizer import Tokenizer, build_tokenizer
from data.tokenizer_config import tokenizer_config
from paro.arguments.parser import parse_args
from paro.distributed.user_errors import run_script
from paro.errors import UserError, flag_of
from paro.report.log import print_line
from tools.inspection.contents import Contents, read_contents
from tools.inspection.lengths import (
    document_lengths,
    draw_picture,
    draw_text,
    figures,
    histogram,
)
from tools.inspection.training_samples import dump
from tools.shared.command_line import Parser
from tools.shared.picture import check_can_draw

PATH_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
SHOWN_CHARACTERS = 300
SHOWN_TOKENS = 400


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        usage="%(prog)s [flag ...] [flag of pretrain_llama.py ...]",
        description=(
            "Counts the documents and tokens of each corpus of --data-path, checks them against "
            "their checksums, draws how long the documents are and, with the tokenizer's flags, "
            "decodes some of them. With --dump-samples it writes the samples that a training with "
            "the same flags would see. All flags of pretrain_llama.py are understood, so that the "
            "command of a training can be taken as it is."
        ),
        epilog=(
            "examples: python tools/inspect_dataset.py --data-path books_text_document "
            "--tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model; with "
            "--dump-samples samples.jsonl --seq-length 2048 --train-samples 1000 --split 95,5,0 "
            "added, the first 1000 samples of training"
        ),
    )
    add = parser.add_argument
    add(
        "--dump-samples",
        type=Path,
        metavar="FILE",
        help='write the --train-samples samples of the training split, a line {"tokens": [...]} '
        "each, in the order of training, and nothing else",
    )
    add(
        "--iteration",
        type=int,
        metavar="N",
        help="with --dump-samples: the samples of iteration N alone, with their numbers and text",
    )
    add(
        "--documents",
        type=int,
        default=3,
        metavar="N",
        help="how many documents of each corpus to decode, evenly spread over it "
        "(default: %(default)s)",
    )
    add("--histogram", type=Path, metavar="FILE.png", help="draw the lengths as a picture too")
    add(
        "--write-checksums",
        action="store_true",
        help="write the checksums of each corpus that has none, such as those that Megatron-LM "
        "wrote: PREFIX.bin.crc; training then checks what it reads",
    )
    return parser


def prefixes_of(args: Namespace) -> list[str]:
    """Return the corpora that the flags name, as training would interpret them."""
    blends = [
        parse_blend(words, flag_of(name)) for name in PATH_FLAGS if (words := getattr(args, name))
    ]
    if args.data_args_path is not None:
        blends.append(read_blend(args.data_args_path, "--data-args-path"))
    if args.per_split_data_args_path is not None:
        flag = "--per-split-data-args-path"
        blends += read_blend_per_split(args.per_split_data_args_path, flag).values()
    if args.data_phases is not None:
        blends += (phase.blend for phase in read_phases(args.data_phases))
    if not blends:
        raise UserError("nothing to look at: give --data-path PREFIX")
    return list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))


def describe(
    dataset: IndexedDataset, lengths: NDArray[np.int64], contents: Contents
) -> Iterator[str]:
    yield (
        f"{dataset.prefix}: {dataset.num_documents:,} documents, {len(dataset):,} sequences, "
        f"{dataset.num_tokens:,} tokens as {dataset.dtype.name} "
        f"({dataset.num_tokens * dataset.dtype.itemsize / 1e6:,.1f} MB)"
    )
    yield f"  documents without a token: {int((lengths == 0).sum()):,}"
    if dataset.num_tokens > 0:
        yield f"  token ids: {contents.least} to {contents.most}"
    yield f"  checksums: {contents.checksums}"
    if dataset.loss_mask_file is not None:
        masks = (dataset.read_marks(*part) for part in dataset.part_ranges())
        count = sum(int(np.count_nonzero(loss_mask)) for loss_mask in masks)
        share = f" ({count / dataset.num_tokens:.1%})" if dataset.num_tokens else ""
        yield f"  conversations: {count:,} tokens{share} are answered"
    yield f"  tokens of a document: {figures(lengths)}"
    yield from (f"  {line}" for line in draw_text(histogram(lengths)))


def describe_origin(prefix: str, given: Fingerprint | None) -> str:
    """Say which tokenizer made a corpus, and whether it is the given one."""
    made_with = read_fingerprint(prefix)
    if made_with is None:
        return "  made with a tokenizer that no .tokenizer file names"
    line = f"  made with {made_with.describe()}"
    if given is None:
        return line
    same = given.digest == made_with.digest
    return line + (", which is the one given" if same else f", and not with {given.describe()}")


def describe_with_tokenizer(
    dataset: IndexedDataset, tokenizer: Tokenizer, contents: Contents, num_documents: int
) -> Iterator[str]:
    """End of documents, ids that the tokenizer does not have, and some documents as text."""
    yield (
        "  documents that end with the end-of-document token: "
        f"{contents.ended:,} of {contents.filled:,}"
    )
    if contents.most >= tokenizer.vocab_size:
        yield (
            f"  the tokenizer has {tokenizer.vocab_size:,} ids: this corpus was made with another"
        )
        return
    count = min(num_documents, dataset.num_documents)
    chosen = np.linspace(0, dataset.num_documents - 1, count, dtype=np.int64).tolist()
    bounds = dataset.document_indices()
    for number in dict.fromkeys(chosen):
        sequences = range(*bounds[number : number + 2].tolist())
        yield f"  document {number:,}: {shown_text(dataset, tokenizer, sequences)}"


def shown_text(dataset: IndexedDataset, tokenizer: Tokenizer, sequences: range) -> str:
    """Return the beginning of a document in one line."""
    ids: list[int] = []
    for sequence in sequences:
        ids += dataset[sequence][: SHOWN_TOKENS - len(ids)].tolist()
    text = tokenizer.decode(ids)
    whole = len(ids) < SHOWN_TOKENS and len(text) <= SHOWN_CHARACTERS
    return repr(text[:SHOWN_CHARACTERS]) + ("" if whole else " ...")


def inspect(options: Namespace, args: Namespace) -> None:
    if options.documents < 0:
        raise UserError(f"--documents {options.documents} must be 0 or more")
    check_can_draw(options.histogram, "--histogram")
    prefixes = prefixes_of(args)
    config = tokenizer_config(vars(args))
    tokenizer = None if config is None else build_tokenizer(config)
    fingerprint = None if config is None else fingerprint_of(config)
    by_name = {}
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        lengths = document_lengths(dataset)
        by_name[prefix] = histogram(lengths)
        eod = None if tokenizer is None else tokenizer.eod
        contents = read_contents(dataset, lengths, eod, write_checksums=options.write_checksums)
        origin = describe_origin(prefix, fingerprint)
        print_line(*describe(dataset, lengths, contents), origin)
        if tokenizer is not None:
            lines = describe_with_tokenizer(dataset, tokenizer, contents, options.documents)
            print_line(*lines, whole=True)
    if options.histogram is not None:
        draw_picture(options.histogram, by_name)
        print_line(f"wrote {options.histogram}")


def main(argv: Sequence[str] | None = None) -> None:
    options, rest = make_parser().parse_known_args(argv)
    args = parse_args(rest, trains=options.dump_samples is not None)
    if options.dump_samples is not None and options.write_checksums:
        raise UserError("--dump-samples and --write-checksums: give one of them")
    if options.iteration is not None and options.dump_samples is None:
        raise UserError("--iteration needs --dump-samples FILE")
    if options.dump_samples is not None:
        print_line(dump(args, options.dump_samples, options.iteration))
    else:
        inspect(options, args)


if __name__ == "__main__":
    run_script("inspect_dataset.py", main)
