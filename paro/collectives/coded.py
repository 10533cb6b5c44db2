"""Sums gradients between groups as codes, each rank's contribution encoded once."""

# [Note: sums of codes]
# Every rank has its group's sum of a range, and every rank of the span owns a piece of the total.
# A rank encodes the pieces of all owners, its own too, each after a Hadamard transform; the owner
# decodes what it receives and adds it in fp32, in rank order, and transforms the sum back. Where a
# range has several holders, the owners encode their sums once more and all-gather them, so that
# every holder decodes the same bytes. Infinity and NaN survive: the scale of their block is not
# finite, so neither is any value of it, and the step is skipped as always.

from __future__ import annotations

import torch
from torch import Tensor

from paro.collectives.wire import Wire, shard_in
from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import CommStreams, Event
from paro.distributed.groups import GroupConfig, Groups, make_groups, no_groups
from paro.quantization.blocks import decode, encode, hadamard
from paro.quantization.encoded import parts_of
from paro.quantization.formats import PAD
from paro.quantization.ranges import RangeCodes
from paro.strategy import CommPlan, exchange_groups, exchange_span
from paro.topology import AxisSpan, Topology, Use, nested_range


class CodedReduction:
    """Reduces along `inter` to one piece a rank; `replicas` then gather the pieces of a range."""

    def __init__(
        self,
        groups: Groups,
        streams: CommStreams,
        traffic: ByteCounter,
        *,
        inter: AxisSpan,
        replicas: AxisSpan,
        exact_dtype: torch.dtype,
    ) -> None:
        self._groups = groups
        self._streams = streams
        self._wire = Wire(groups, traffic)
        self._inter = inter
        self._replicas = replicas
        self._exact_dtype = exact_dtype  # of elements that have no code

    def reduce(
        self, whole: Tensor, start: int, codes: RangeCodes, result: Tensor, *, after: Event
    ) -> Event:
        """Queues the sum of `whole`, which begins at `start` of the unit, into `result`.

        `result` is this rank's optimizer range, a part of `whole` or, with replicas, more than it.
        """

        def job() -> None:
            total, exact, place = self._exchange(whole, start, codes)
            if self._replicas:
                self._gather(total, exact, place, codes, result)
            else:
                _write(result, hadamard(total) / PAD, exact)

        key = (Use.EXCHANGE, *(axis.index for axis in self._inter))
        return self._streams.submit(key, job, after=after)

    def close(self) -> None:
        """Closes the process groups; the comm stream is closed with the others."""
        self._groups.close()

    def _exchange(self, whole: Tensor, start: int, codes: RangeCodes) -> tuple[Tensor, Tensor, int]:
        """The sum of this rank's piece, its transformed and its exact elements, and its start."""
        rank = self._groups.rank
        members = self._groups.topology.members(self._inter, rank)
        sent = torch.zeros(len(members), codes.range_bytes, dtype=torch.uint8, device=whole.device)
        for row, member in zip(sent, members, strict=True):
            begin, end = nested_range(self._inter, member, whole.numel())
            self._encode(whole[begin:end], start + begin, codes, row)
        received = self._wire.all_to_all(Use.EXCHANGE, self._inter, sent)
        place = start + nested_range(self._inter, rank, whole.numel())[0]
        coded = codes.num_coded(place)
        total = torch.zeros(-(-coded // PAD) * PAD, device=whole.device)
        exact = torch.zeros(codes.numel - coded, device=whole.device)
        for row in received:
            octets, plain = parts_of(row, codes, place, self._exact_dtype)
            for part, values in decode(octets, codes.form, total.numel()):
                total[part] += values
            exact += plain
        return total, exact, place

    def _encode(self, values: Tensor, start: int, codes: RangeCodes, out: Tensor) -> None:
        octets, exact = parts_of(out, codes, start, self._exact_dtype)
        coded = codes.num_coded(start)
        encode(values[:coded], codes.form, octets, transforms=True)
        exact.copy_(values[coded:])

    def _gather(
        self, total: Tensor, exact: Tensor, start: int, codes: RangeCodes, result: Tensor
    ) -> None:
        """Encodes a sum that is still transformed; all holders decode the same bytes."""
        rank, run = self._groups.rank, self._replicas
        ranges = result.view(-1, codes.numel)
        encoded = torch.zeros(
            len(ranges) * codes.range_bytes, dtype=torch.uint8, device=result.device
        )
        octets, plain = parts_of(shard_in(encoded, run, rank), codes, start, self._exact_dtype)
        encode(total, codes.form, octets)
        plain.copy_(exact)
        for depth in reversed(range(len(run))):
            part, axis = shard_in(encoded, run[:depth], rank), (run[depth],)
            self._wire.all_gather(Use.EXCHANGE, axis, part, shard_in(part, axis, rank))
        own = nested_range(run, rank, result.numel())[0]
        for index, values in enumerate(ranges):
            begin = start - own + index * codes.numel
            row = encoded[index * codes.range_bytes :]
            octets, plain = parts_of(row, codes, begin, self._exact_dtype)
            sums = torch.zeros(-(-codes.num_coded(begin) // PAD) * PAD, device=result.device)
            for place, decoded in decode(octets, codes.form, sums.numel()):
                sums[place] = decoded
            _write(values, hadamard(sums) / PAD, plain)


def _write(result: Tensor, sums: Tensor, exact: Tensor) -> None:
    coded = result.numel() - exact.numel()
    result[:coded] = sums[:coded]
    result[coded:] = exact


def make_coded_reduction(
    comm_plan: CommPlan,
    *,
    topology: Topology,
    rank: int,
    streams: CommStreams,
    traffic: ByteCounter,
    exact_dtype: torch.dtype,
    group_config: GroupConfig | None,
) -> CodedReduction:
    """The reduction with process groups of its own; collective over the world.

    With `group_config` None no process group is created: for planning a rank that never runs.
    """
    if group_config is None:
        groups = no_groups(topology, rank)
    else:
        runs = {Use.EXCHANGE: exchange_groups(comm_plan)}
        groups = make_groups(topology, rank, runs, group_config)
    return CodedReduction(
        groups,
        streams,
        traffic,
        inter=exchange_span(comm_plan),
        replicas=comm_plan.replicas,
        exact_dtype=exact_dtype,
    )
