"""Times reading micro-batches of a corpus: mapped, by reads, with checksums; and its opening.

    python tools/bench/bench_loader.py --folder DIR

Writes a corpus of random ids into the folder, and reads micro-batches of it in a random order in
this process, as a run without worker processes does. The contenders take turns. With a warm page
cache their processor time counts, which other programs disturb less; without the corpus in the page
cache, the clock. Opening a corpus checks all pointers and documents of its index.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.batch import BatchFetcher
from data.block_checksums import BlockSums, sums_path
from data.config import DataConfig
from data.gpt_dataset import SplitRequest, build_gpt_dataset
from data.indexed_dataset import (
    EncodedDocuments,
    IndexedDataset,
    IndexedDatasetWriter,
    Tokens,
    bin_path,
    idx_path,
    sequence_pointers,
)
from data.loader import MicroBatches
from paro.distributed.user_errors import run_script
from paro.errors import UserError
from tools.bench.shared.turns import median_ratio
from tools.shared.command_line import Parser
from tools.shared.meters import drop_from_cache
from tools.shared.output import write_json

VOCAB_SIZE = 60_000
DOCUMENT_TOKENS = 1000  # on average
WRITTEN_AT_ONCE = 2**22  # tokens
BLOCKS = (4096, 8192, 16384, 32768, 65536)


class MappedDataset(IndexedDataset):
    """A data set whose files are mapped into memory, as Megatron-LM does by default."""

    def __init__(self, prefix: str | Path) -> None:
        super().__init__(prefix)
        self._tokens = np.memmap(bin_path(prefix), dtype=self.dtype, mode="r")
        self._mapped_lengths = self.sequence_lengths()
        self._mapped_pointers = sequence_pointers(self._mapped_lengths, self.dtype.itemsize)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        stop = int(self._mapped_lengths[index]) if length is None else offset + length
        begin = int(self._mapped_pointers[index]) // self.dtype.itemsize
        part: Tokens = self._tokens[begin + offset : begin + stop]
        return part


Contender = Callable[[], IndexedDataset]


def make_corpus(folder: Path, num_tokens: int) -> dict[str, Contender]:
    """Write the corpus under one name for each contender; they share its .bin and .idx."""
    folder.mkdir(parents=True, exist_ok=True)
    random, first = np.random.default_rng(0), folder / "corpus"
    with IndexedDatasetWriter(first, np.dtype("<u2")) as writer:
        while writer.num_tokens < num_tokens:
            ids = random.integers(0, VOCAB_SIZE, WRITTEN_AT_ONCE).astype("<u2")
            cuts = np.cumsum(random.exponential(DOCUMENT_TOKENS, WRITTEN_AT_ONCE // 1000) + 1)
            lengths = np.diff([0, *cuts[cuts < len(ids)].astype(int), len(ids)]).astype(np.int32)
            counts = np.ones(len(lengths), dtype=np.int64)  # documents of one sequence
            writer.add_documents(EncodedDocuments(ids, lengths, counts))
    sums_path(bin_path(first)).unlink()
    with bin_path(first).open("rb") as stream:
        os.fsync(stream.fileno())  # else its pages cannot be dropped
    contenders: dict[str, Contender] = {
        "mapped": partial(MappedDataset, first),
        "read": partial(IndexedDataset, first),
    }
    for block_bytes in BLOCKS:
        prefix = folder / f"blocks-{block_bytes}"
        for path in (bin_path, idx_path):
            path(prefix).unlink(missing_ok=True)
            path(prefix).symlink_to(path(first).name)
        sums = BlockSums(block_bytes)
        whole = IndexedDataset(first)
        for part in whole.part_ranges():
            sums.update(whole.read(*part))
        sums.write(sums_path(bin_path(prefix)))
        contenders[f"checked, {block_bytes // 1024} KiB"] = partial(IndexedDataset, prefix)
    return contenders


def time_turn(contender: Contender, options: argparse.Namespace, *, cold: bool, turn: int) -> float:
    """Return tokens per second of one contender."""
    indexed = contender()
    whole = DataConfig(train_data_path=(indexed.prefix,), seq_length=options.seq_length, seed=1)
    request = SplitRequest(
        config=whole, split_name="train", num_samples=None, vocab_size=VOCAB_SIZE
    )
    dataset = build_gpt_dataset(indexed, request)
    if cold:
        gc.collect()  # pages that an earlier turn has mapped would stay
        drop_from_cache((*options.folder.glob("*.bin"), *options.folder.glob("*.crc")))
    batches = MicroBatches(
        BatchFetcher(dataset),
        micro_batch_size=options.micro_batch_size,
        consumed_samples=turn * options.samples % max(1, len(dataset) - options.samples),
    )
    clock = time.perf_counter if cold else time.process_time
    begin = clock()
    count = sum(
        batch.tokens_BS.numel()
        for batch in islice(batches, options.samples // options.micro_batch_size)
    )
    return count / (clock() - begin)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per contender and state of the page cache, of medians over rounds."""
    contenders = make_corpus(options.folder, int(options.gigabytes * 1e9 / 2))
    for cold in (False, True):
        turns = [
            [time_turn(each, options, cold=cold, turn=turn) for each in contenders.values()]
            for turn in range(options.rounds + 1)
        ]
        # Not the first one, which builds the order, and warms the page cache.
        rates = dict(zip(contenders, zip(*turns[1:], strict=True), strict=True))
        for name, measured in rates.items():
            yield {
                "contender": name,
                "cold": cold,
                "tokens_per_second": statistics.median(measured),
                "of_mapped": median_ratio(measured, rates["mapped"]),
                "all": measured,
            }


def measure_opening(prefix: Path, rounds: int) -> dict[str, Any]:
    """Return processor time of opening the corpus, its index checked; the page cache is warm."""
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        indexed = IndexedDataset(prefix)
        seconds.append(time.process_time() - begin)
    return {"documents": indexed.num_documents, "seconds": statistics.median(seconds)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="an empty folder on the disk to measure")
    add("--gigabytes", type=float, default=2.0, help="of the corpus; default 2")
    add("--seq-length", type=int, default=2048)
    add("--micro-batch-size", type=int, default=4)
    add("--samples", type=int, default=2000, help="of a turn; default 2000")
    add("--rounds", type=int, default=5, help="turns of each contender; default 5")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    if min(options.rounds, options.samples // options.micro_batch_size) < 1:
        raise UserError("--rounds and --samples must be at least 1, the latter a micro-batch")
    rows = []
    for row in measure(options):
        rows.append(row)
        cache = "cold" if row["cold"] else "warm"
        print(
            f"{cache} {row['contender']:<16} {row['tokens_per_second']:14,.0f} tokens/s, "
            f"{row['of_mapped']:.2f} of mapped in the same turn"
        )
    opening = measure_opening(options.folder / "corpus", options.rounds)
    print(f"opened in {1e3 * opening['seconds']:.1f} ms: {opening['documents']:,} documents")
    write_json(options.json, {"reading": rows, "opening": opening})


if __name__ == "__main__":
    run_script("bench_loader.py", main)
