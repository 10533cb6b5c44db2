"""Samples, also synthetic ones, and micro-batches made of them, with their documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.config import DocumentRules
from data.loss_mask import BEGINS, TRAINED, LossMask
from paro.errors import UserError, is_storage_failure, open_files_limit

RESTART_PROBABILITY = 0.1  # per token, of a jump to another position of the cycle
TokenBytes = NDArray[np.int64]  # index: token id; value: bytes of text that the id stands for


class Sample(NamedTuple):
    """The seq_length + 1 token ids of a sample, and their loss mask; None: all are trained on."""

    text: NDArray[np.int64]
    loss_mask: LossMask | None = None


class Samples(Protocol):
    """A finite set of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def describe(self) -> str: ...


@dataclass(kw_only=True, eq=False)
class MockDataset:
    """A walk along a fixed random cycle through the vocabulary, with jumps to random positions.

    The token after t is always the same unless there is a jump, and jumps favour some positions.
    So the loss falls at once (frequencies) and keeps falling (successors), down to the entropy of
    the jumps. Every stream (train, valid, test) has its own samples on the same cycle.
    """

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        self.cycle = np.random.RandomState(self.seed).permutation(self.vocab_size)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        random = np.random.Generator(np.random.PCG64([self.seed, self.stream, index]))
        count = self.seq_length + 1
        jumps = random.random(count) < RESTART_PROBABILITY
        jumps[0] = True
        uniform = random.random(count)
        targets = (len(self.cycle) * uniform * uniform * uniform).astype(np.int64)  # skewed
        times = np.arange(count)
        latest_jump = np.maximum.accumulate(np.where(jumps, times, 0))
        places = targets[latest_jump] + times - latest_jump
        return Sample(self.cycle[places % len(self.cycle)])

    def describe(self) -> str:
        return f"{self.num_samples:,} samples of synthetic tokens (--mock-data)"


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of one rank; labels are the next tokens, ignored where loss_mask is 0.

    A batch that was cut for context parallelism has some positions of each sample. Tokens, labels,
    mask and positions are of these positions only; other fields describe whole samples.
    """

    tokens_BS: Tensor  # noqa: N815  int64
    labels_BS: Tensor  # noqa: N815  int64
    loss_mask_BS: Tensor  # noqa: N815  float32
    mask_sum: float
    text_bytes: float = 0.0  # bytes of text of the labels, weighted by the mask; 0: not counted
    positions_BS: Tensor | None = None  # noqa: N815  int64, [B or 1, S]; None: 0 to S - 1
    document_lengths: tuple[int, ...] | None = None  # of all samples; None: one per sample
    seq_length: int | None = None  # tokens of a whole sample; None: the batch was not cut
    ranges: tuple[range, ...] | None = None  # positions in this batch, in order; None: all

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._with(lambda part: part.pin_memory())

    def share_memory(self) -> Batch:
        return self._with(lambda part: part.share_memory_())

    def documents(self) -> dict[str, Any]:
        """Return the keyword arguments for the model that describe documents sharing a sample."""
        kwargs = {"positions_BS": self.positions_BS, "document_lengths": self.document_lengths}
        return kwargs if self.seq_length is None else {**kwargs, "seq_length": self.seq_length}

    def cut(self, ranges: tuple[range, ...]) -> Batch:
        """Return a batch with only these positions of each sample, copied."""

        def copied(part_BS: Tensor) -> Tensor:
            return torch.cat([part_BS[:, each.start : each.stop] for each in ranges], dim=1)

        seq_length, places_BS = self.tokens_BS.shape[1], self.positions_BS
        if places_BS is None:
            places_BS = torch.arange(seq_length)[None]
        cut = replace(self, positions_BS=places_BS, seq_length=seq_length, ranges=ranges)
        return cut._with(copied)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        changed: dict[str, Any] = {
            name: change(part) for name, part in parts.items() if isinstance(part, Tensor)
        }
        return replace(self, **changed)


Failure = UserError | OSError  # OSError: the storage failed, or too many files are open


@dataclass(eq=False)
class BatchFetcher(Dataset[Batch | Failure]):
    """A map from the sample numbers of a micro-batch to the batch.

    `UserError` and `OSError` are returned as values: an exception that is raised in a worker
    process would reach the trainer only as a traceback text.
    """

    dataset: Samples
    rules: DocumentRules = field(default_factory=DocumentRules)
    eod: int = -1  # id of the token that ends a document; -1: no token does
    whole: bool = False  # True: read the set in rounds, each padded at its end with masked samples
    ranges: tuple[range, ...] | None = None  # the positions of each sample to keep; None: all
    token_bytes: TokenBytes | None = None  # bytes of text per id; None: do not count bytes

    def __getitem__(self, numbers: range) -> Batch | Failure:
        last = len(self.dataset) - 1
        beyond = sum(number > last for number in numbers)
        if beyond and not self.whole:
            return UserError(
                f"the data set ends after {len(self.dataset)} samples and sample {numbers[-1]} is "
                "asked for: more is drawn than --train-iters, --train-samples or --eval-iters "
                "announced when it was built"
            )
        try:
            batch = self._collate([min(number, last) for number in numbers], num_masked=beyond)
            return batch if self.ranges is None else batch.cut(self.ranges)
        except UserError as error:
            return error
        except OSError as error:
            if not is_storage_failure(error) and open_files_limit(error) is None:
                raise
            return error

    def _collate(self, numbers: Sequence[int], num_masked: int) -> Batch:
        """Make a batch of samples of seq_length + 1 tokens; the last `num_masked` are masked.

        Documents begin at the first token of a sample and after every EOD. The EOD token belongs to
        the document that it ends, and predicts the first token of the next one unless its loss is
        masked. In samples with a loss mask, documents are conversations, and only answered tokens
        are predicted.

        Bytes of text are counted here, on the host, where worker processes read ahead. So no table
        is copied to the device, and no sum is copied back.
        """
        samples = [self.dataset[number] for number in numbers]
        text = np.stack([sample.text for sample in samples])
        tokens_BS, labels_BS = text[:, :-1].copy(), text[:, 1:].copy()
        ends_BS = tokens_BS == self.eod
        begins_BS = np.ones_like(ends_BS)
        begins_BS[:, 1:] = ends_BS[:, :-1]
        loss_mask_BS = np.ones(tokens_BS.shape, dtype=np.float32)
        for row, (_, loss_mask) in enumerate(samples):
            if loss_mask is not None:
                loss_mask_BS[row] = loss_mask[1:] == TRAINED
                begins_BS[row, 1:] = loss_mask[1:-1] == BEGINS
        if self.rules.eod_mask_loss:
            loss_mask_BS[ends_BS] = 0.0
        loss_mask_BS[len(numbers) - num_masked :] = 0.0
        positions_BS, document_lengths, text_bytes = None, None, 0.0
        if self.rules.reset_position_ids:
            places = np.arange(tokens_BS.shape[1])
            latest_begin = np.maximum.accumulate(np.where(begins_BS, places, 0), axis=1)
            positions_BS = torch.from_numpy(places - latest_begin)
        if self.rules.reset_attention_mask:
            (begins,) = np.nonzero(begins_BS.reshape(-1))
            document_lengths = tuple(np.diff(begins, append=tokens_BS.size).tolist())
        if self.token_bytes is not None:
            text_bytes = float((self.token_bytes[labels_BS] * loss_mask_BS).sum())
        return Batch(
            torch.from_numpy(tokens_BS),
            torch.from_numpy(labels_BS),
            torch.from_numpy(loss_mask_BS),
            mask_sum=float(loss_mask_BS.sum(dtype=np.float64)),
            text_bytes=text_bytes,
            positions_BS=positions_BS,
            document_lengths=document_lengths,
        )
