"""Document boundaries inside a sample: loss mask, positions and document lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.loss_mask import BEGINS, TRAINED, LossMask


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """Effects of the end-of-document token; by default none, as in Megatron."""

    eod: int
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


class Bounds(NamedTuple):
    """The loss mask, positions and document lengths of a batch; None for the default."""

    loss_mask_BS: NDArray[np.float32]  # noqa: N815
    positions_BS: NDArray[np.int64] | None  # noqa: N815
    document_lengths: tuple[int, ...] | None  # tokens of each document, sample after sample


def bounds_of(
    tokens_BS: NDArray[np.int64],
    rules: DocumentRules | None,
    loss_masks: Sequence[LossMask | None] = (),
) -> Bounds:
    """Compute the bounds: documents begin at the first token of a sample and after every EOD.

    The EOD token belongs to the document that it ends, and predicts the first token of the next
    one unless its loss is masked. With `loss_masks` (seq_length + 1 entries per sample), documents
    are conversations, and only answered tokens are predicted.
    """
    loss_mask_BS = np.ones(tokens_BS.shape, dtype=np.float32)
    of_conversations = [
        (row, of_row) for row, of_row in enumerate(loss_masks) if of_row is not None
    ]
    for row, of_row in of_conversations:
        loss_mask_BS[row] = of_row[1:] == TRAINED
    if rules is None:
        return Bounds(loss_mask_BS, None, None)
    ends_BS = tokens_BS == rules.eod
    if rules.eod_mask_loss:
        loss_mask_BS[ends_BS] = 0.0
    begins_BS = np.ones_like(ends_BS)
    begins_BS[:, 1:] = ends_BS[:, :-1]
    for row, of_row in of_conversations:
        begins_BS[row, 1:] = of_row[1:-1] == BEGINS
    positions_BS, document_lengths = None, None
    if rules.reset_position_ids:
        places = np.arange(tokens_BS.shape[1])
        positions_BS = places - np.maximum.accumulate(np.where(begins_BS, places, 0), axis=1)
    if rules.reset_attention_mask:
        (begins,) = np.nonzero(begins_BS.reshape(-1))
        document_lengths = tuple(np.diff(begins, append=tokens_BS.size).tolist())
    return Bounds(loss_mask_BS, positions_BS, document_lengths)
