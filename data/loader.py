"""Data sets by configuration, and this rank's micro-batches from them in Megatron's order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.blend import Blend, parse_blend, read_blend, read_blend_per_split
from data.blended_dataset import SplitRequest, build_samples
from data.document_bounds import DocumentRules, bounds_of
from data.gpt_dataset import Sampling, TooFewTokensError, check_vocabulary
from data.indexed_dataset import IndexedDataset
from data.mock import MockDataset
from data.sample_order import SPLIT_NAMES, parse_split, share_of

DEFAULT_SPLIT = "969, 30, 1"
MAX_SEED = 2**32 - 1


class Samples(Protocol):
    """A finite set of samples, each seq_length + 1 token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens to train on and how to fetch them."""

    seq_length: int
    data_path: tuple[str, ...] = ()
    data_args_path: str | None = None
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    per_split_data_args_path: str | None = None
    mock_data: bool = False
    split: str | None = None  # of data for all splits; None: DEFAULT_SPLIT
    data_cache_path: str | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    num_workers: int = 2
    seed: int = 1234

    def __post_init__(self) -> None:
        given = [flag for flag, is_given in self._sources().items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} contradict each other: give one of them")
        if not given:
            raise ValueError(
                "no data: give --data-path PREFIX, or --mock-data for synthetic tokens"
            )
        blends = self.blends()
        if not self.mock_data and "train" not in blends:
            raise ValueError(f"{given[0]} is given and no training data: give --train-data-path")
        if self.is_per_split and self.split is not None:
            raise ValueError(f"--split and {given[0]} contradict each other: give one of them")
        if self.seq_length < 1:
            raise ValueError(f"--seq-length {self.seq_length} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers} must be 0 or more")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed} must lie between 0 and {MAX_SEED}")
        parse_split(self.split or DEFAULT_SPLIT)

    def document_rules(self, eod: int) -> DocumentRules | None:
        """What the end of a document changes; None where it changes nothing."""
        rules = DocumentRules(
            eod=eod,
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
        )
        return None if rules == DocumentRules(eod=eod) else rules

    def _sources(self) -> dict[str, bool]:
        """Where data may come from, of which one is given."""
        per_split = {f"--{name}-data-path": words for name, words in self._words().items()}
        first_given = next((flag for flag, words in per_split.items() if words), "")
        return {
            "--mock-data": self.mock_data,
            "--data-path": bool(self.data_path),
            "--data-args-path": self.data_args_path is not None,
            first_given or "--train-data-path": bool(first_given),
            "--per-split-data-args-path": self.per_split_data_args_path is not None,
        }

    def _words(self) -> dict[str, tuple[str, ...]]:
        return {name: getattr(self, f"{name}_data_path") for name in SPLIT_NAMES}

    @property
    def is_per_split(self) -> bool:
        """Whether every split has data of its own, instead of a part of all data."""
        return self.per_split_data_args_path is not None or any(self._words().values())

    def blends(self) -> dict[str, Blend]:
        """What each split is made of; none for synthetic tokens."""
        if self.per_split_data_args_path is not None:
            return read_blend_per_split(self.per_split_data_args_path, "--per-split-data-args-path")
        if self.is_per_split:
            return {
                name: parse_blend(words, f"--{name}-data-path")
                for name, words in self._words().items()
                if words
            }
        if self.data_args_path is not None:
            return dict.fromkeys(SPLIT_NAMES, read_blend(self.data_args_path, "--data-args-path"))
        if self.data_path:
            return dict.fromkeys(SPLIT_NAMES, parse_blend(self.data_path, "--data-path"))
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """How many samples a run draws from each split."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """One data set per split; None where a split is not asked for or has not a single sample."""

    train: Samples
    valid: Samples | None
    test: Samples | None
    causes: Mapping[str, str] = field(default_factory=dict)  # why a split has no sample

    def describe(self) -> list[str]:
        """One line per split, for the start of a run."""
        lines = []
        for name in SPLIT_NAMES:
            samples: Samples | None = getattr(self, name)
            if samples is not None:
                lines.append(f"{name}: {samples.describe()}")
            elif name in self.causes:
                lines.append(f"{name}: no samples, its evaluation is left out: {self.causes[name]}")
            else:
                lines.append(f"{name}: no samples")
        return lines


def build_datasets(config: DataConfig, num_samples: SplitCounts, vocab_size: int) -> Datasets:
    """The splits with at least the samples asked for; `vocab_size` is the tokenizer's own."""
    counts = {name: getattr(num_samples, name) for name in SPLIT_NAMES}
    # Training data is opened even if no sample of it is asked for: a run may only evaluate.
    wanted = [name for name in SPLIT_NAMES if name == "train" or counts[name] > 0]
    if config.mock_data:
        mock = {
            name: MockDataset(
                num_samples=counts[name],
                seq_length=config.seq_length,
                vocab_size=vocab_size,
                seed=config.seed,
                stream=SPLIT_NAMES.index(name),
            )
            for name in wanted
        }
        return Datasets(train=mock["train"], valid=mock.get("valid"), test=mock.get("test"))
    return _build_from_corpora(config, {name: counts[name] for name in wanted}, vocab_size)


def _build_from_corpora(config: DataConfig, counts: Mapping[str, int], vocab_size: int) -> Datasets:
    """The splits named in `counts`; a held-out one without a sample is left out."""

    @cache  # several splits and blends may share a corpus
    def open_corpus(prefix: str) -> IndexedDataset:
        corpus = IndexedDataset(prefix)
        check_vocabulary(corpus, vocab_size)
        return corpus

    sampling = Sampling(
        split=None if config.is_per_split else config.split or DEFAULT_SPLIT,
        seq_length=config.seq_length,
        seed=config.seed,
        cache_path=config.data_cache_path,
    )
    blends = config.blends()
    found: dict[str, Samples] = {}
    causes: dict[str, str] = {}
    for name, count in counts.items():
        is_held_out = name != "train"
        if is_held_out and (name not in blends or share_of(sampling.split, name) is None):
            continue
        request = SplitRequest(
            split_name=name,
            sampling=sampling,
            num_samples=count,
            vocab_size=vocab_size,
            open_corpus=open_corpus,
        )
        try:
            found[name] = build_samples(blends[name], request)
        except TooFewTokensError as error:
            if not is_held_out:
                raise
            causes[name] = str(error)
    return Datasets(
        train=found["train"], valid=found.get("valid"), test=found.get("test"), causes=causes
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank; labels are the tokens that follow, masked where mask is 0."""

    tokens_BS: Tensor  # noqa: N815  int64
    labels_BS: Tensor  # noqa: N815  int64
    loss_mask_BS: Tensor  # noqa: N815  float32
    positions_BS: Tensor | None = None  # noqa: N815  int64; None: a sample's own
    document_lengths: tuple[int, ...] | None = None  # of all samples; None: a sample is one

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._with(lambda part: part.pin_memory())

    def documents(self) -> dict[str, Any]:
        """What the model is told of documents that share a sample, as its keywords."""
        return {"positions_BS": self.positions_BS, "document_lengths": self.document_lengths}

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        positions_BS = self.positions_BS
        return Batch(
            change(self.tokens_BS),
            change(self.labels_BS),
            change(self.loss_mask_BS),
            None if positions_BS is None else change(positions_BS),
            self.document_lengths,
        )


def collate(samples: Sequence[NDArray[np.int64]], rules: DocumentRules | None = None) -> Batch:
    """Tokens and labels of samples that are one token longer than the sequence."""
    text = np.stack(samples)
    bounds = bounds_of(text[:, :-1], rules)
    positions = bounds.positions_BS
    return Batch(
        torch.from_numpy(text[:, :-1].copy()),
        torch.from_numpy(text[:, 1:].copy()),
        torch.from_numpy(bounds.loss_mask_BS),
        None if positions is None else torch.from_numpy(positions),
        bounds.document_lengths,
    )


@dataclass(eq=False)
class MicroBatches:
    """This rank's micro-batches, endlessly in order from `consumed_samples` on.

    Micro-batch m takes samples consumed + (m * world_size + rank) * micro_batch_size and those
    behind it, Megatron's dataloader type `single`. How many micro-batches make a step is the
    caller's affair, so batch ramp-up and resuming need nothing here. Drawing a sample that the
    data set does not have raises `ValueError`; nothing is read twice.

    With workers, processes read ahead; order and content are the same as without.
    """

    dataset: Samples
    _: KW_ONLY
    rank: int
    world_size: int
    micro_batch_size: int
    consumed_samples: int = 0
    num_workers: int = 0
    pin_memory: bool = False
    rules: DocumentRules | None = None
    _source: Iterator[Batch | Exception] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}"
        assert self.micro_batch_size > 0, f"micro-batch of {self.micro_batch_size}"
        assert self.consumed_samples >= 0, f"{self.consumed_samples} samples consumed"

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> Batch:
        if self._source is None:
            self._source = self._read_ahead() if self.num_workers > 0 else self._read()
        try:
            batch = next(self._source)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            raise ChildProcessError(
                f"a process that reads training data ahead is gone ({error}): often memory was "
                "short; run again with a smaller --num-workers, or with 0 to see what it meets"
            ) from error
        if isinstance(batch, Exception):
            raise batch
        return batch

    def sample_numbers(self) -> Iterator[range]:
        """The samples of micro-batch 0, 1, ...; without end."""
        stride = self.micro_batch_size * self.world_size
        begin = self.consumed_samples + self.rank * self.micro_batch_size
        while True:
            yield range(begin, begin + self.micro_batch_size)
            begin += stride

    def _read(self) -> Iterator[Batch | Exception]:
        fetch = _Fetch(self.dataset, self.rules)
        for numbers in self.sample_numbers():
            batch = fetch[numbers]
            if self.pin_memory and isinstance(batch, Batch):
                batch = batch.pin_memory()
            yield batch

    def _read_ahead(self) -> Iterator[Batch | Exception]:
        loader: DataLoader[Batch | Exception] = DataLoader(
            _Fetch(self.dataset, self.rules),
            batch_size=None,
            sampler=self.sample_numbers(),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=_unchanged,
            worker_init_fn=_leave_process_group,
            generator=torch.Generator(),  # else it draws from the global one, which is the model's
        )
        with _child_signals_left_alone():
            return iter(loader)


@contextmanager
def _child_signals_left_alone() -> Iterator[None]:
    """Undoes the handler by which torch would raise at any place of the training thread.

    Without it the end of a worker is noticed where its batch is waited for.
    """
    if threading.current_thread() is not threading.main_thread():  # where torch sets none either
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _leave_process_group(worker: int) -> None:
    # A launcher signals the whole process group of a rank. Those that read go on until the trainer
    # leaves, so that it can finish its step and save.
    os.setpgid(0, 0)


class _Fetch(Dataset[Batch | Exception]):
    """Micro-batches by the numbers of their samples.

    A user's mistake is a value here, because an exception would come out of a worker process as a
    page of traceback.
    """

    def __init__(self, dataset: Samples, rules: DocumentRules | None) -> None:
        self.dataset = dataset
        self.rules = rules

    def __getitem__(self, numbers: range) -> Batch | Exception:
        if numbers[-1] >= len(self.dataset):
            return ValueError(
                f"the data set ends after {len(self.dataset)} samples and sample {numbers[-1]} is "
                "asked for: more is drawn than --train-iters, --train-samples or --eval-iters "
                "announced when it was built"
            )
        try:
            return collate([self.dataset[number] for number in numbers], self.rules)
        except ValueError as error:
            return error


def _unchanged(batch: Any) -> Any:  # DataLoader's type for it says list, with or without batches
    return batch
