"""Samples, and micro-batches made of them, including document positions and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.document_bounds import DocumentRules, bounds_of
from paro.errors import UserError, is_storage_failure


class Samples(Protocol):
    """A finite set of samples, each seq_length + 1 token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank; labels are the next tokens, ignored where loss_mask is 0."""

    tokens_BS: Tensor  # noqa: N815  int64
    labels_BS: Tensor  # noqa: N815  int64
    loss_mask_BS: Tensor  # noqa: N815  float32
    positions_BS: Tensor | None = None  # noqa: N815  int64; None: 0 to S - 1
    document_lengths: tuple[int, ...] | None = None  # of all samples; None: one per sample

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._with(lambda part: part.pin_memory())

    def share_memory(self) -> Batch:
        return self._with(lambda part: part.share_memory_())

    def documents(self) -> dict[str, Any]:
        """Keyword arguments for the model that describe documents sharing a sample."""
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
    """A batch of tokens and labels from samples of seq_length + 1 tokens."""
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


Failure = UserError | OSError  # the latter is of the storage


@dataclass(eq=False)
class Fetch(Dataset[Batch | Failure]):
    """Maps the sample numbers of a micro-batch to the batch.

    Errors of the user and of the storage are returned as values: of an exception that is raised in
    a worker process only a page of text arrives.
    """

    dataset: Samples
    rules: DocumentRules | None
    masks_beyond_end: bool = False

    def __getitem__(self, numbers: range) -> Batch | Failure:
        last = len(self.dataset) - 1
        if self.masks_beyond_end:
            batch = self._collate([min(number, last) for number in numbers])
            if isinstance(batch, Batch):
                batch.loss_mask_BS[[number > last for number in numbers]] = 0.0
            return batch
        if numbers[-1] > last:
            return UserError(
                f"the data set ends after {len(self.dataset)} samples and sample {numbers[-1]} is "
                "asked for: more is drawn than --train-iters, --train-samples or --eval-iters "
                "announced when it was built"
            )
        return self._collate(numbers)

    def _collate(self, numbers: Sequence[int]) -> Batch | Failure:
        try:
            return collate([self.dataset[number] for number in numbers], self.rules)
        except UserError as error:
            return error
        except OSError as error:
            if not is_storage_failure(error):
                raise
            return error
