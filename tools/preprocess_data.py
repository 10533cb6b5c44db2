"""Turns text into Megatron's indexed data sets: `<prefix>_<key>_document.bin` and `.idx`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.config import MOST_WORKERS
from data.corpus import read_batches
from data.fingerprint import fingerprint_of
from data.indexed_dataset import IndexedDatasetWriter, dtype_for_vocab
from data.sources import SourceChunk, share_out
from data.tokenizer_config import TOKENIZER_TYPES, tokenizer_config
from paro.distributed.user_errors import run_script
from paro.errors import UserError, flag_of
from paro.report.log import print_line
from tools.preprocessing.conversations import TOOLS
from tools.preprocessing.encode import (
    EncodedBatch,
    EncodingPlan,
    Tally,
    encode_all,
    prepare,
    tasks_of,
    tokenizer_of,
)
from tools.preprocessing.inputs import add_source_args, chunks_of
from tools.preprocessing.partitions import MOST_PARTITIONS, Partitions
from tools.preprocessing.progress import Progress
from tools.preprocessing.summary import describe_skipped, summary_of
from tools.preprocessing.workers import Workers, worker_processes
from tools.shared.command_line import Parser, add_trainer_flags

MOST = {
    "workers": MOST_WORKERS,
    "workers_to_check": MOST_WORKERS,
    "partitions": MOST_PARTITIONS,
    "log_interval": 2**63 - 1,
    "max_documents": 2**63 - 1,
}
NO_SENTENCES = (
    "--split-sentences is not supported: LLaMA trains on whole documents. A data set that has "
    "sentences as lists of texts keeps them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A corpus to be written, with checked flags."""

    chunks: tuple[SourceChunk, ...]
    output_prefix: str
    plan: EncodingPlan
    partitions: int = 1

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.output_prefix}_{name}_document" for name in self.plan.names]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


def encoded_batches(
    chunks: Sequence[SourceChunk], plan: EncodingPlan, workers: Workers
) -> Iterator[EncodedBatch]:
    batches = read_batches(chunks, plan.keys, skip_malformed=plan.skip_malformed)
    tasks = tasks_of(batches)
    return chain.from_iterable(workers.map(partial(encode_all, plan), tasks))


@contextmanager
def writing(prefixes: Sequence[str], plan: EncodingPlan) -> Iterator[list[IndexedDatasetWriter]]:
    """Open a writer per prefix; at the end all files get their final names, or none."""
    dtype = dtype_for_vocab(tokenizer_of(plan.tokenizer).vocab_size)
    made_with = fingerprint_of(plan.tokenizer, with_bytes=True)
    with ExitStack() as files:
        writers = [
            files.enter_context(
                IndexedDatasetWriter(prefix, dtype, made_with, has_loss_mask=plan.conversations)
            )
            for prefix in prefixes
        ]
        yield writers
        for writer in writers:
            writer.complete()


def write_batches(
    writers: Sequence[IndexedDatasetWriter], batches: Iterator[EncodedBatch], progress: Progress
) -> Tally:
    """Append all batches; return their tally."""
    tally = Tally()
    for batch in batches:
        for writer, documents in zip(writers, batch.by_key, strict=True):
            writer.add_documents(documents)
        tally += batch.tally
        progress.count(batch.tally)
    return tally


def preprocess(job: Job, workers: Workers, progress: Progress) -> list[str]:
    """Write all data sets of the plan or none; return a line on each, and on bad documents."""
    if job.partitions == 1:
        with writing(job.prefixes, job.plan) as writers:
            batches = encoded_batches(job.chunks, job.plan, workers)
            tally = write_batches(writers, batches, progress)
            check_not_empty(job, writers, tally)
    else:
        shares = share_out(job.chunks, job.partitions)
        partitions = Partitions(job.output_prefix, job.plan, shares)
        tally = write_partitions(partitions, shares, job.plan, workers, progress)
        with writing(job.prefixes, job.plan) as writers:
            partitions.join(writers)
            if any(writer.num_tokens == 0 for writer in writers):
                partitions.remove()  # a repeated run would not find the rest
            check_not_empty(job, writers, tally)
        partitions.remove()
    progress.finish()
    return summary_of(job.plan, writers, tally)


def write_partitions(
    partitions: Partitions,
    shares: Sequence[Sequence[SourceChunk]],
    plan: EncodingPlan,
    workers: Workers,
    progress: Progress,
) -> Tally:
    """Write the partitions that no earlier run has finished; return the tally of all."""
    total = Tally()
    for number, share in enumerate(shares):
        tally = partitions.finished(number)
        if tally is None:
            with writing(partitions.prefixes(number), plan) as writers:
                tally = write_batches(writers, encoded_batches(share, plan, workers), progress)
            partitions.finish(number, tally)
        else:
            print_line(
                f"partition {number + 1} of {len(shares)} is done already", stream=sys.stderr
            )
            progress.passed_over(tally.advance)
        total += tally
    return total


def check_not_empty(job: Job, writers: Sequence[IndexedDatasetWriter], tally: Tally) -> None:
    for key, writer in zip(job.plan.names, writers, strict=True):
        if writer.num_tokens == 0:
            sources = sorted({chunk.path for chunk in job.chunks})
            shown = " ".join(sources[:3]) + (" ..." if len(sources) > 3 else "")
            skipped = " ".join(describe_skipped(tally))
            raise UserError(
                f"--input {shown} holds no text under the key {key!r}"
                + (f": {skipped}" if skipped else "")
            )


def find_optimal_workers(job: Job, counts: Sequence[int], max_documents: int) -> list[str]:
    """Time each number of workers on the beginning of the corpus; keep no output."""
    rates: dict[int, float] = {}
    for count in counts:
        with (
            tempfile.TemporaryDirectory() as folder,
            worker_processes(count, prepare, job.plan) as workers,
            writing([f"{folder}/{name}" for name in job.plan.names], job.plan) as writers,
        ):
            batches = encoded_batches(job.chunks, job.plan, workers)
            first = next(batches, None)  # when it arrives, the workers have started
            begin, documents = time.perf_counter(), 0
            for batch in batches if first is not None else ():
                documents += batch.tally.documents
                for writer, encoded in zip(writers, batch.by_key, strict=True):
                    writer.add_documents(encoded)
                if documents >= max_documents:
                    break
            rates[count] = documents / max(time.perf_counter() - begin, 1e-9)
    best = max(rates, key=lambda count: rates[count])
    lines = [f"--workers {count}: {rate:.1f} docs/s" for count, rate in rates.items()]
    return [*lines, f"the fastest on this machine is --workers {best}; nothing was written"]


def add_input_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input data")
    add_source_args(group)
    group.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="keys of the JSON objects, or columns, to read, one data set each; a value is a text "
        "or a list of sentences (default: text; of conversations messages)",
    )
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="documents are conversations, written by the tokenizer's own chat template, with "
        "marks of the tokens that the assistant answers: under one of --json-keys a list of "
        "messages with role and content, or from and value, or under several a prompt and its "
        "completion, which is the last. A further key tools adds what the assistant may call",
    )
    group.add_argument(
        "--skip-malformed",
        action="store_true",
        help="leave out and count lines, rows and texts that are no document (no JSON, no UTF-8, "
        "no text under a key) instead of stopping at the first",
    )
    group.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    group.add_argument(
        "--keep-newlines", action="store_true", help="accepted: texts are always kept as they are"
    )
    # Megatron's flags for splitting sentences, and for choices that older versions had.
    group.add_argument("--lang", default="english", help=argparse.SUPPRESS)
    group.add_argument("--dataset-impl", choices=("mmap",), help=argparse.SUPPRESS)
    group.add_argument("--chunk-size", type=int, help=argparse.SUPPRESS)
    group = parser.add_argument_group("tokenization process")
    group.add_argument(
        "--tokenizer-type",
        metavar="TYPE",
        help=f"needed without --vocab-file: {' '.join(TOKENIZER_TYPES)}",
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="SentencePiece .model file, tokenizer.json, folder of a transformers tokenizer, or "
        "for TikTokenizer a file in tiktoken's form",
    )
    group.add_argument("--vocab-size", type=int, help="for NullTokenizer: texts are ids below it")
    add_trainer_flags(group, "vocab_file", "merge_file", "null_tokenizer_eod_id")
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end each document with the end-of-document token, as pre-training wants it",
    )


def add_runtime_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("runtime").add_argument
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes to tokenize with (default: one per core)",
    )
    add(
        "--partitions",
        type=int,
        default=1,
        help="write the corpus in so many parts and join them; an interrupted run resumes "
        "after the last finished part when it is repeated (default: %(default)s)",
    )
    add(
        "--keep-sequential-samples",
        action="store_true",
        help="accepted: documents always stay in their order, in partitions too",
    )
    add(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between progress lines, where there is no terminal for a bar "
        "(default: %(default)s)",
    )
    add(
        "--find-optimal-num-workers",
        action="store_true",
        help="time --workers-to-check over --max-documents, say which is fastest, write nothing",
    )
    add("--workers-to-check", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    add("--max-documents", type=int, default=100_000, metavar="N")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Tokenizes text and writes it in Megatron-LM's format, PREFIX_KEY_document.bin and "
            ".idx, the checksums of .bin in .bin.crc, and in .tokenizer which tokenizer that was. "
            "Give the training --data-path PREFIX_KEY_document, without .bin or .idx."
        ),
        epilog=(
            "example: python tools/preprocess_data.py --input books.jsonl --output-prefix books "
            "--append-eod --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model"
        ),
    )
    add_input_args(parser)
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX")
    add_runtime_args(parser)
    return parser


def check_counts(args: argparse.Namespace) -> None:
    """Raise `UserError` for a number of processes, files or documents that cannot be meant."""
    for flag, limit in MOST.items():
        given = getattr(args, flag)
        for count in given if isinstance(given, list) else [given]:
            if not 1 <= count <= limit:
                name = flag_of(flag)
                rule = "at least 1" if count < 1 else f"at most {limit}"
                raise UserError(f"{name} {count} must be {rule}")


def job_of(args: argparse.Namespace) -> Job:
    """Return the job that the flags describe; `UserError` for a job that cannot be done."""
    if args.split_sentences:
        raise UserError(NO_SENTENCES)
    check_counts(args)
    tokenizer = tokenizer_config(vars(args))
    if tokenizer is None:
        raise UserError(f"--tokenizer-type is missing: give one of {', '.join(TOKENIZER_TYPES)}")
    default = "messages" if args.apply_chat_template else "text"
    plan = EncodingPlan(
        tokenizer=tokenizer,
        keys=tuple(dict.fromkeys(args.json_keys or [default])),
        append_eod=args.append_eod,
        skip_malformed=args.skip_malformed,
        conversations=args.apply_chat_template,
    )
    if plan.conversations and not {*plan.keys} - {TOOLS}:
        raise UserError(
            f"--json-keys {TOOLS}: with --apply-chat-template give the key of messages, or those "
            f"of prompt and completion; {TOOLS} comes in addition"
        )
    chunks = tuple(chunks_of(args))
    prepare(plan)  # reports a mistake in the tokenizer before any process starts
    return Job(
        chunks=chunks, output_prefix=args.output_prefix, plan=plan, partitions=args.partitions
    )


def run(args: argparse.Namespace) -> None:
    job = job_of(args)
    if args.find_optimal_num_workers:
        lines = find_optimal_workers(job, args.workers_to_check, args.max_documents)
    else:
        progress = Progress(total_bytes=job.num_bytes, interval=args.log_interval)
        with worker_processes(args.workers, prepare, job.plan) as workers:
            lines = preprocess(job, workers, progress)
    print_line(*lines)


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except KeyboardInterrupt:
        print_line(
            "preprocess_data.py: stopped; with --partitions it can be resumed", stream=sys.stderr
        )
        sys.exit(130)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    run_script("preprocess_data.py", main)
