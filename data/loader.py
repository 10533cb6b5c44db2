"""Builds the configured data sets, and yields this rank's micro-batches in Megatron's order."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.batch import Batch, BatchFetcher, Failure, MockDataset, Samples, TokenBytes
from data.blend import Blend
from data.blended_dataset import BlendedDataset, PhasedDataset, build_phases, build_samples
from data.config import DataConfig
from data.gpt_dataset import NAMED, GPTDataset, SplitRequest, TooFewTokensError, open_checked
from data.indexed_dataset import IndexedDataset
from data.sample_order import SPLIT_NAMES, share_of
from data.tokenizer_config import TokenizerConfig
from paro.errors import UserError, open_files_limit
from paro.files.waits import LimitedWait
from paro.text import listed

_FILES = 14  # open files per corpus at most: 5 of the corpus, and 3 with the order of each split
_POLL_SECONDS = 5.0  # how often a rank that waits for a batch looks whether its workers live


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """The number of samples a run draws from each split; None: every sample once."""

    train: int
    consumed: int = 0  # training samples before the first one that is drawn
    valid: int | None = 0
    test: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """The data sets of all splits; none of a split that is not requested or has no sample."""

    train: Samples
    valid: Mapping[str, Samples] = field(default_factory=dict)  # by name; "": one without a name
    test: Samples | None = None
    causes: Mapping[str, str] = field(default_factory=dict)  # data set: why it has no sample

    def describe(self) -> list[str]:
        """Return one line per split or validation set, printed at the start of a run."""
        lines = {
            name: f"{name}: {samples.describe() if samples else 'no samples'}"
            for name, samples in self._by_name().items()
        }
        for name, cause in self.causes.items():
            lines[name] = f"{name}: no samples, its evaluation is left out: {cause}"
        opened = {c.indexed.prefix: c.indexed for c in chain(*self.corpora().values())}
        prefixes = [prefix for prefix, corpus in opened.items() if not corpus.has_checksums]
        if prefixes:
            names = [*prefixes[:NAMED], f"{len(prefixes) - NAMED} more"][: len(prefixes)]
            lines["checksums"] = (
                f"no checksums (.bin.crc), so damage is not noticed: {listed(names)}; "
                "tools/inspect_dataset.py --write-checksums writes them"
            )
        return [*lines.values()]

    def corpora(self) -> dict[str, tuple[GPTDataset, ...]]:
        """Return the corpora of every data set, by the name under which it is reported."""
        return {name: _corpora_of(samples) for name, samples in self._by_name().items()}

    def _by_name(self) -> dict[str, Samples | None]:
        """Return all data sets by the names under which they are reported."""
        sets: Mapping[str, Samples | None] = self.valid or {"": None}
        valid = {f"valid, {name}" if name else "valid": samples for name, samples in sets.items()}
        return {"train": self.train, **valid, "test": self.test}

    def token_bytes(
        self, samples: Samples, vocab_size: int, trained_on: Container[str] | None = None
    ) -> TokenBytes | None:
        """Count the bytes of text of every id of a set; 0 for ids above its tokenizer's.

        None unless all corpora of the set have equal counts, and their tokenizers are among those
        that the model was `trained_on`, if known.
        """
        origins = {corpus.indexed.made_with for corpus in _corpora_of(samples)}
        tables = {made_with.token_bytes if made_with else None for made_with in origins}
        table = tables.pop() if len(tables) == 1 else None
        known = trained_on is None or all(each.digest in trained_on for each in origins if each)
        if table is None or not known:
            return None
        counts = np.array(table.split(), dtype=np.int64)
        return np.pad(counts, (0, max(0, vocab_size - len(counts))))

    def train_order(self) -> list[list[int]]:
        """Describe how the number of training samples affects their order, to compare runs.

        For each corpus: the shuffled epochs, and the samples before a separately shuffled last one.
        """
        plans = [corpus.plan for corpus in self.corpora()["train"]]
        return [[plan.num_epochs, plan.samples_before_separate_epoch or 0] for plan in plans]


def _corpora_of(samples: Samples | None) -> tuple[GPTDataset, ...]:
    if isinstance(samples, PhasedDataset):
        return tuple(chain.from_iterable(map(_corpora_of, samples.data_sets)))
    corpora = samples.members if isinstance(samples, BlendedDataset) else (samples,)
    return tuple(corpus for corpus in corpora if isinstance(corpus, GPTDataset))


def build_datasets(
    config: DataConfig, num_samples: SplitCounts, vocab_size: int, tokenizer: TokenizerConfig | None
) -> Datasets:
    """Build the splits with the samples requested; `vocab_size` is unpadded.

    A held-out split of which no sample is requested, or which has none, is left out.
    """
    sets, phases = _sets(config), config.phases()
    _allow_open_files([*filter(None, sets.values()), *(phase.blend for phase in phases)])

    @cache  # several splits and blends may share a corpus
    def open_corpus(prefix: str) -> IndexedDataset:
        return open_checked(config, prefix, vocab_size, tokenizer)

    request = SplitRequest(
        split_name="train",
        config=config,
        num_samples=num_samples.train,
        vocab_size=vocab_size,
        open_corpus=open_corpus,
    )
    datasets: dict[tuple[str, str], Samples] = {}
    if phases:
        datasets["train", ""] = build_phases(phases, request, num_samples.consumed)
    causes: dict[str, str] = {}
    for (split_name, set_name), blend in sets.items():
        # Training data is opened even if no sample of it is requested: a run may only evaluate.
        is_held_out, count = split_name != "train", getattr(num_samples, split_name)
        if is_held_out and count == 0:
            continue
        if blend is None:
            datasets[split_name, set_name] = MockDataset(
                num_samples=count,
                seq_length=config.seq_length,
                vocab_size=vocab_size,
                seed=config.seed,
                stream=SPLIT_NAMES.index(split_name),
            )
            continue
        if is_held_out and not share_of(config.split_in_use, split_name):
            continue
        request = replace(request, split_name=split_name, num_samples=count)
        try:
            datasets[split_name, set_name] = build_samples(blend, request)
        except TooFewTokensError as error:
            if not is_held_out:
                raise
            causes[f"{split_name}, {set_name}" if set_name else split_name] = str(error)
    return Datasets(
        train=datasets["train", ""],
        valid={name: datasets[split, name] for split, name in datasets if split == "valid"},
        test=datasets.get(("test", "")),
        causes=causes,
    )


def _allow_open_files(blends: Iterable[Blend]) -> None:
    """Raise the limit of open files by that of the corpora, as far as the system lets it."""
    prefixes = {prefix for blend in blends for prefix in blend.prefixes}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + _FILES * len(prefixes)
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _sets(config: DataConfig) -> dict[tuple[str, str], Blend | None]:
    """Return the blend of each split, or of each named validation set; None: synthetic tokens."""
    if config.mock_data:
        return dict.fromkeys(((split_name, "") for split_name in SPLIT_NAMES), None)
    sets: dict[tuple[str, str], Blend | None] = {}
    for split_name, blend in config.blends().items():
        if split_name != "valid" or not config.multiple_validation_sets:
            sets[split_name, ""] = blend
            continue
        names = [Path(prefix).name for prefix in blend.prefixes]
        for name, prefix in zip(names, blend.prefixes, strict=True):
            unique = name if names.count(name) == 1 else prefix
            sets[split_name, unique] = replace(blend, prefixes=(prefix,))
    return sets


@dataclass(eq=False)
class MicroBatches:
    """An endless iterator over this rank's micro-batches, in order from `consumed_samples` on.

    Micro-batch m has micro_batch_size samples, starting at consumed + (m * data_parallel_size +
    data_parallel_rank) * micro_batch_size: Megatron's dataloader type `single`. The caller decides
    how many micro-batches make a step, so batch ramp-up and resuming need no code here. Drawing a
    sample beyond the end of the data set raises `UserError`; nothing is read twice.

    With workers, processes read ahead; order and content do not change.
    """

    fetch: BatchFetcher
    _: KW_ONLY
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    consumed_samples: int = 0
    num_workers: int = 0
    pin_memory: bool = False
    _source: Iterator[Batch | Failure] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> Batch:
        if self._source is None:
            self._source = self._read()
        try:
            batch = self._received(self._source)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            # torch's message for a dead worker; the other errors occur while a batch is received.
            if (limit := open_files_limit(error)) is not None:
                raise UserError(limit) from error
            text = str(error)
            gone = text.startswith("DataLoader worker (pid")
            if isinstance(error, RuntimeError) and not gone and "shared memory" in text:
                raise self._no_shared_memory(text.splitlines()[-1]) from error
            if self.num_workers == 0 or (isinstance(error, RuntimeError) and not gone):
                raise
            raise UserError(
                f"a process that reads data ahead is gone ({error}): often memory was short; run "
                "again with a smaller --num-workers, or with 0 to see what it meets"
            ) from error
        if not isinstance(batch, Batch):
            try:
                raise batch
            finally:
                del batch  # otherwise a reference cycle with this frame remains
        return batch

    def _received(self, source: Iterator[Batch | Failure]) -> Batch | Failure:
        wait = LimitedWait(
            f"a batch from {self.num_workers} processes that read data ahead: a file system may "
            "have stopped answering"
        )
        while True:
            try:
                return next(source)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):  # torch's message
                    raise
            wait.check()

    def sample_numbers(self) -> Iterator[range]:
        """Return the samples of micro-batch 0, 1, ...; endless."""
        first = self.data_parallel_rank * self.micro_batch_size
        size, stride = self.micro_batch_size, self.micro_batch_size * self.data_parallel_size
        starts: Iterable[int] = count(self.consumed_samples, stride)
        if self.fetch.whole:  # round after round
            starts = chain.from_iterable(repeat(range(0, len(self.fetch.dataset), stride)))
        # An iterator that references `self`, and so its own reader, would be freed by the garbage
        # collector, which frees the queues of the workers before these are stopped, and then waits
        # 5 seconds for each.
        return (range(start + first, start + first + size) for start in starts)

    def _read(self) -> Iterator[Batch | Failure]:
        loader: DataLoader[Batch | Failure] = DataLoader(
            self.fetch,
            batch_size=None,
            sampler=self.sample_numbers(),
            num_workers=self.num_workers,
            # After it, check for dead workers and wait again.
            timeout=_POLL_SECONDS if self.num_workers else 0,
            pin_memory=self.pin_memory,
            collate_fn=_shared if self.num_workers else None,
            # A launcher signals the whole process group of a rank. Workers must keep running until
            # the trainer exits, so that it can finish its step and save.
            worker_init_fn=lambda _: os.setpgid(0, 0),
            generator=torch.Generator(),  # keeps DataLoader from drawing from the global RNG
        )
        # Torch's handler of SIGCHLD could raise anywhere in the training thread. Without it a dead
        # worker is detected where its batch is waited for.
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            return iter(loader)
        except OSError as error:  # semaphores are there too
            if (limit := open_files_limit(error)) is not None:
                raise UserError(limit) from error
            raise self._no_shared_memory(str(error)) from error
        finally:
            if threading.current_thread() is threading.main_thread():  # in others torch sets none
                signal.signal(signal.SIGCHLD, handler)

    def _no_shared_memory(self, cause: str) -> UserError:
        return UserError(
            f"--num-workers {self.num_workers} needs /dev/shm, where processes share memory "
            f"({cause}): make it writable and larger (docker run --shm-size), or give "
            "--num-workers 0"
        )


def _shared(batch: Any) -> Any:  # DataLoader's annotation is list, even without batching
    """Move a batch into shared memory in the worker, so that the trainer sees a lack of memory.

    torch would move the batch in its sender thread, where an error loses the batch, and the trainer
    would wait forever.
    """
    return batch.share_memory() if isinstance(batch, Batch) else batch
