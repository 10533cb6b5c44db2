"""Data sets by configuration, and this rank's micro-batches from them in Megatron's order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.gpt_dataset import Sampling, build_gpt_dataset, check_vocabulary
from data.indexed_dataset import IndexedDataset
from data.mock import MockDataset
from data.sample_order import SPLIT_NAMES, parse_split

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
    mock_data: bool = False
    split: str = DEFAULT_SPLIT
    data_cache_path: str | None = None
    num_workers: int = 2
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.mock_data and self.data_path:
            raise ValueError("--mock-data and --data-path contradict each other: give one of them")
        if not self.mock_data and not self.data_path:
            raise ValueError(
                "no data: give --data-path PREFIX, or --mock-data for synthetic tokens"
            )
        if len(self.data_path) > 1:
            raise ValueError(
                f"--data-path takes the prefix of one corpus, {len(self.data_path)} words were "
                f"given: {' '.join(self.data_path)}"
            )
        if self.seq_length < 1:
            raise ValueError(f"--seq-length {self.seq_length} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers} must be 0 or more")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed} must lie between 0 and {MAX_SEED}")
        parse_split(self.split)


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

    def describe(self) -> list[str]:
        """One line per split, for the start of a run."""
        named = ((name, getattr(self, name)) for name in SPLIT_NAMES)
        return [f"{name}: {data.describe() if data else 'no samples'}" for name, data in named]


def build_datasets(config: DataConfig, num_samples: SplitCounts, vocab_size: int) -> Datasets:
    """The splits with at least the samples asked for; `vocab_size` is the tokenizer's own."""
    counts = {name: getattr(num_samples, name) for name in SPLIT_NAMES}
    # Training data is opened even if no sample of it is asked for: a run may only evaluate.
    wanted = [name for name in SPLIT_NAMES if name == "train" or counts[name] > 0]
    found: dict[str, Samples | None] = {}
    if config.mock_data:
        for name in wanted:
            found[name] = MockDataset(
                num_samples=counts[name],
                seq_length=config.seq_length,
                vocab_size=vocab_size,
                seed=config.seed,
                stream=SPLIT_NAMES.index(name),
            )
    else:
        indexed = IndexedDataset(config.data_path[0])
        check_vocabulary(indexed, vocab_size)
        sampling = Sampling(
            split=config.split,
            seq_length=config.seq_length,
            seed=config.seed,
            cache_path=config.data_cache_path,
        )
        for name in wanted:
            found[name] = build_gpt_dataset(
                indexed, name, sampling, num_samples=counts[name], vocab_size=vocab_size
            )
    train = found["train"]
    assert train is not None, "a training split without a sample is refused where it is built"
    return Datasets(train=train, valid=found.get("valid"), test=found.get("test"))


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank; labels are the tokens that follow, masked where mask is 0."""

    tokens_BS: Tensor  # noqa: N815  int64
    labels_BS: Tensor  # noqa: N815  int64
    loss_mask_BS: Tensor  # noqa: N815  float32

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def pin_memory(self) -> Batch:
        return Batch(*(part.pin_memory() for part in self._parts()))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens_BS, self.labels_BS, self.loss_mask_BS


def collate(samples: Sequence[NDArray[np.int64]]) -> Batch:
    """Tokens and labels of samples that are one token longer than the sequence."""
    text = torch.from_numpy(np.stack(samples))
    tokens_BS = text[:, :-1].contiguous()
    labels_BS = text[:, 1:].contiguous()
    return Batch(tokens_BS, labels_BS, torch.ones(tokens_BS.shape, dtype=torch.float32))


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
        batch = next(self._source)
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
        fetch = _Fetch(self.dataset)
        for numbers in self.sample_numbers():
            batch = fetch[numbers]
            if self.pin_memory and isinstance(batch, Batch):
                batch = batch.pin_memory()
            yield batch

    def _read_ahead(self) -> Iterator[Batch | Exception]:
        loader: DataLoader[Batch | Exception] = DataLoader(
            _Fetch(self.dataset),
            batch_size=None,
            sampler=self.sample_numbers(),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=_unchanged,
            worker_init_fn=_leave_process_group,
            generator=torch.Generator(),  # else it draws from the global one, which is the model's
        )
        return iter(loader)


def _leave_process_group(worker: int) -> None:
    # A launcher signals the whole process group of a rank. Those that read go on until the trainer
    # leaves, so that it can finish its step and save.
    os.setpgid(0, 0)


class _Fetch(Dataset[Batch | Exception]):
    """Micro-batches by the numbers of their samples.

    A user's mistake is a value here, because an exception would come out of a worker process as a
    page of traceback.
    """

    def __init__(self, dataset: Samples) -> None:
        self.dataset = dataset

    def __getitem__(self, numbers: range) -> Batch | Exception:
        if numbers[-1] >= len(self.dataset):
            return ValueError(
                f"the data set ends after {len(self.dataset)} samples and sample {numbers[-1]} is "
                "asked for: more is drawn than --train-iters, --train-samples or --eval-iters "
                "announced when it was built"
            )
        try:
            return collate([self.dataset[number] for number in numbers])
        except ValueError as error:
            return error


def _unchanged(batch: Any) -> Any:  # DataLoader's type for it says list, with or without batches
    return batch
