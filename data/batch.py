"""Samples, and micro-batches made of them, including document positions and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.document_bounds import DocumentRules, bounds_of
from data.loss_mask import LossMask
from paro.errors import UserError, is_storage_failure, open_files_limit

TokenBytes = NDArray[np.int64]  # index: token id; value: bytes of text that the id stands for


class Samples(Protocol):
    """A finite set of samples; each sample has seq_length + 1 token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...

    def loss_mask(self, index: int) -> LossMask | None:
        """Return the loss mask of a sample's tokens; None: every token is trained on."""

    def describe(self) -> str: ...


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
        found = {"positions_BS": self.positions_BS, "document_lengths": self.document_lengths}
        return found if self.seq_length is None else {**found, "seq_length": self.seq_length}

    def cut(self, ranges: tuple[range, ...]) -> Batch:
        """Return a batch with only these positions of each sample, copied."""

        def own(part_BS: Tensor) -> Tensor:
            return torch.cat([part_BS[:, each.start : each.stop] for each in ranges], dim=1)

        seq_length, places_BS = self.tokens_BS.shape[1], self.positions_BS
        if places_BS is None:
            places_BS = torch.arange(seq_length)[None]
        cut = replace(self, positions_BS=places_BS, seq_length=seq_length, ranges=ranges)
        return cut._with(own)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        positions_BS = self.positions_BS
        return replace(
            self,
            tokens_BS=change(self.tokens_BS),
            labels_BS=change(self.labels_BS),
            loss_mask_BS=change(self.loss_mask_BS),
            positions_BS=None if positions_BS is None else change(positions_BS),
        )


def collate(
    samples: Sequence[NDArray[np.int64]],
    rules: DocumentRules | None = None,
    *,
    loss_masks: Sequence[LossMask | None] = (),
    num_masked: int = 0,
    token_bytes: TokenBytes | None = None,
) -> Batch:
    """Make a batch of samples of seq_length + 1 tokens; the last `num_masked` are masked.

    Bytes of text are counted here, on the host, where worker processes read ahead. So no table is
    copied to the device, and no sum is copied back.
    """
    text = np.stack(samples)
    bounds = bounds_of(text[:, :-1], rules, loss_masks)
    positions, loss_mask = bounds.positions_BS, bounds.loss_mask_BS
    loss_mask[len(samples) - num_masked :] = 0.0
    text_bytes = 0.0
    if token_bytes is not None:
        text_bytes = float((token_bytes[text[:, 1:]] * loss_mask).sum())
    return Batch(
        torch.from_numpy(text[:, :-1].copy()),
        torch.from_numpy(text[:, 1:].copy()),
        torch.from_numpy(loss_mask),
        mask_sum=float(loss_mask.sum(dtype=np.float64)),
        text_bytes=text_bytes,
        positions_BS=None if positions is None else torch.from_numpy(positions),
        document_lengths=bounds.document_lengths,
    )


Failure = UserError | OSError  # OSError: the storage failed, or too many files are open


@dataclass(eq=False)
class Fetch(Dataset[Batch | Failure]):
    """A map from the sample numbers of a micro-batch to the batch.

    `UserError` and `OSError` are returned as values: an exception that is raised in a worker
    process would reach the trainer only as a traceback text.
    """

    dataset: Samples
    rules: DocumentRules | None = None
    whole: bool = False  # True: read the set in rounds, each padded at its end with masked samples
    ranges: tuple[range, ...] | None = None  # the positions of each sample to keep; None: all
    token_bytes: TokenBytes | None = None  # bytes of text per id; None: do not count bytes

    def __getitem__(self, numbers: range) -> Batch | Failure:
        last = len(self.dataset) - 1
        if self.whole:
            beyond = sum(number > last for number in numbers)
            return self._collate([min(number, last) for number in numbers], num_masked=beyond)
        if numbers[-1] > last:
            return UserError(
                f"the data set ends after {len(self.dataset)} samples and sample {numbers[-1]} is "
                "asked for: more is drawn than --train-iters, --train-samples or --eval-iters "
                "announced when it was built"
            )
        return self._collate(numbers)

    def _collate(self, numbers: Sequence[int], *, num_masked: int = 0) -> Batch | Failure:
        try:
            samples = [self.dataset[number] for number in numbers]
            batch = collate(
                samples,
                self.rules,
                loss_masks=[self.dataset.loss_mask(number) for number in numbers],
                num_masked=num_masked,
                token_bytes=self.token_bytes,
            )
            return batch if self.ranges is None else batch.cut(self.ranges)
        except UserError as error:
            return error
        except OSError as error:
            if not is_storage_failure(error) and open_files_limit(error) is None:
                raise
            return error
