"""Sums gradients between groups as codes, each rank's contribution encoded once."""

# [Note: sums of codes]
# Every rank has its group's sum of a range, and every rank of the span owns a piece of the total.
# A rank encodes the pieces of all owners, its own too, each after a Hadamard transform; the owner
# decodes what it receives and adds it in fp32, in rank order, and transforms the sum back. Where a
# range has several holders, the owners encode their sums once more and all-gather them, so that
# every holder decodes the same bytes. Infinity and NaN survive: the scale of their block is not
# finite, so neither is any value of it, and the step is skipped as always.
#
# With error feedback a rank adds to what it encodes a moving average of what its codes lost before,
# one byte an element. All ranks forget it with a skipped step and every `FORGOTTEN_AFTER` steps.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.collectives.wire import shard_in
from paro.distributed.comm_stream import Event
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.quantization.blocks import decode, encode, hadamard, split_encoded
from paro.quantization.formats import PAD, error_bytes
from paro.quantization.ranges import RangeCodes
from paro.topology import AxisSpan, StreamKind, nested_range

FORGOTTEN_AFTER = 1024  # steps, as in DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """This rank's group's sum of gradients: what the rank adds to the total."""

    values: Tensor
    start: int  # in the unit
    codes: RangeCodes
    span: AxisSpan  # along which each rank gets a piece of the total
    replicas: AxisSpan  # and along which the pieces of a range are gathered
    errors: Tensor | None = None  # a row for each owner: what codes have lost, added and renewed


class CodedReduction(Endpoint):
    """Reduces between groups to one piece a rank; replicas then gather the pieces of a range."""

    def __init__(self, groups: Groups, links: Links, *, uncoded_dtype: torch.dtype) -> None:
        super().__init__(groups, links)
        self._uncoded_dtype = uncoded_dtype  # of elements that have no code

    def reduce(self, gradients: Contribution, result: Tensor, *, after: Event) -> Event:
        """Queue the sum of `gradients` over the ranks into `result`.

        `result` is this rank's optimizer range, a part of them or, with replicas, more.
        """

        def job() -> None:
            total, uncoded, place = self._exchange(gradients)
            if gradients.replicas:
                self._gather(total, uncoded, place, gradients, result)
            else:
                _write(result, hadamard(total) / PAD, uncoded)

        return self._submit(StreamKind.EXCHANGE, gradients.span, job, after=after)

    def _exchange(self, gradients: Contribution) -> tuple[Tensor, Tensor, int]:
        """Return the sum of this rank's piece, its transformed and its uncoded elements, and its
        start."""
        rank, whole, start = self._rank, gradients.values, gradients.start
        codes, errors, span = gradients.codes, gradients.errors, gradients.span
        members = self._groups.topology.members(span, rank)
        sent = torch.zeros(len(members), codes.range_bytes, dtype=torch.uint8, device=whole.device)
        for index, member in enumerate(members):
            begin, end = nested_range(span, member, whole.numel())
            error = None if errors is None else errors[index]
            self._encode(whole[begin:end], start + begin, codes, sent[index], error)
        received = torch.empty_like(sent)
        self._wire.all_to_all(StreamKind.EXCHANGE, span, sent, received)
        place = start + nested_range(span, rank, whole.numel())[0]
        coded = codes.num_coded(place)
        total = torch.zeros(-(-coded // PAD) * PAD, device=whole.device)
        uncoded = torch.zeros(codes.numel - coded, device=whole.device)
        for row in received:
            payload, plain = split_encoded(row, codes, place, self._uncoded_dtype)
            decode(payload, codes.form, total, adds=True)
            uncoded += plain
        return total, uncoded, place

    def _encode(
        self, values: Tensor, start: int, codes: RangeCodes, out: Tensor, error: Tensor | None
    ) -> None:
        payload, uncoded = split_encoded(out, codes, start, self._uncoded_dtype)
        coded = codes.num_coded(start)
        own = None if error is None else error[: error_bytes(coded)]
        encode(values[:coded], codes.form, payload, transforms=True, error=own)
        uncoded.copy_(values[coded:])

    def _gather(
        self, total: Tensor, uncoded: Tensor, start: int, gradients: Contribution, result: Tensor
    ) -> None:
        """Encode a sum that is still transformed; all holders decode the same bytes."""
        rank, span, codes = self._rank, gradients.replicas, gradients.codes
        ranges = result.view(-1, codes.numel)
        encoded = torch.zeros(
            len(ranges) * codes.range_bytes, dtype=torch.uint8, device=result.device
        )
        payload, plain = split_encoded(
            shard_in(encoded, span, rank), codes, start, self._uncoded_dtype
        )
        encode(total, codes.form, payload)
        plain.copy_(uncoded)
        for depth in reversed(range(len(span))):
            part, axis = shard_in(encoded, span[:depth], rank), (span[depth],)
            self._wire.all_gather(StreamKind.EXCHANGE, axis, part, shard_in(part, axis, rank))
        own = nested_range(span, rank, result.numel())[0]
        for index, values in enumerate(ranges):
            begin = start - own + index * codes.numel
            row = encoded[index * codes.range_bytes :]
            payload, plain = split_encoded(row, codes, begin, self._uncoded_dtype)
            sums = torch.zeros(-(-codes.num_coded(begin) // PAD) * PAD, device=result.device)
            decode(payload, codes.form, sums)
            _write(values, hadamard(sums) / PAD, plain)


def _write(result: Tensor, sums: Tensor, uncoded: Tensor) -> None:
    coded = result.numel() - uncoded.numel()
    result[:coded] = sums[:coded]
    result[coded:] = uncoded
