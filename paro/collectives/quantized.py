"""Sums quantized gradients between groups: an all-to-all of chunks, each summed by its owner."""

# [Note: quantized sums]
# Every rank has its group's sum of a range, and every rank of the span owns a chunk of the total:
#
#     each rank    Hadamard transform, quantize the chunks of all owners, all-to-all
#     each owner   dequantize, sum in fp32 in rank order, transform back
#     replicas     owners quantize their sums again, all-gather; all replicas dequantize equal bytes
#
# Infinity and NaN survive: they make the scale of a block, and so all of its values, not finite.
# The step is then skipped as always. With error feedback a rank adds a moving average of earlier
# quantization errors, one byte per element, to the values before it quantizes them. All ranks reset
# the average after a skipped step and every `FORGOTTEN_AFTER` steps.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.collectives.wire import Wire
from paro.distributed.comm_stream import Event
from paro.quantization.blocks import choose_kernels, hadamard, split_range
from paro.quantization.formats import PAD, RangeFormat, error_bytes, padded
from paro.topology import AxisSpan, StreamKind, nested_range

FORGOTTEN_AFTER = 1024  # steps, as in DeepSpeed


@dataclass(eq=False, kw_only=True)
class QuantizedSum(Endpoint):
    """Quantized sum of the gradients of a flat buffer over groups, from the sums inside groups.

    A reduce-scatter between groups, and an all-gather to replicas of a range.
    """

    exact_dtype: torch.dtype  # dtype in which unquantized elements are sent
    start: int  # offset of the group's sum in the unit's flat buffer, in elements
    ranges: RangeFormat
    span: AxisSpan  # axes of the all-to-all: each rank along them owns a chunk of the total
    replicas: AxisSpan  # axes of the all-gather: their ranks hold replicas of a range
    errors: Tensor | None = None  # quantization errors, a row for each owner: read and updated

    def reduce(self, values: Tensor, result: Tensor, *, after: Event) -> Event:
        """Queue the sum of `values`, the sum of this rank's group, over the groups into `result`.

        `result` is this rank's optimizer range: its chunk of the total or, with replicas, more.
        """

        def job() -> None:
            total, exact, start = self._reduce_scatter(values)
            if self.replicas:
                self._all_gather(total, exact, start, result)
            else:
                _write(result, hadamard(total) / PAD, exact)

        return self._submit(StreamKind.EXCHANGE, self.span, job, after=after)

    def _reduce_scatter(self, whole: Tensor) -> tuple[Tensor, Tensor, int]:
        """Sum this rank's chunk: return its transformed and its exact elements, and its start."""
        ranges, errors, span, start = self.ranges, self.errors, self.span, self.start
        wire, kernels = Wire(self.groups, StreamKind.EXCHANGE, span), choose_kernels(whole.device)
        members = wire.members
        sent = torch.zeros(len(members), ranges.range_bytes, dtype=torch.uint8, device=whole.device)
        for index, member in enumerate(members):
            begin, end = nested_range(span, member, whole.numel())
            quantized, exact = split_range(sent[index], ranges, start + begin, self.exact_dtype)
            values, rest = whole[begin:end].tensor_split([ranges.num_quantized(start + begin)])
            error = None if errors is None else errors[index][: error_bytes(values.numel())]
            kernels.quantize(values, ranges.form, quantized, transforms=True, error=error)
            exact.copy_(rest)
        received = torch.empty_like(sent)
        wire.all_to_all(sent, received)
        start += nested_range(span, self.groups.rank, whole.numel())[0]
        num_quantized = ranges.num_quantized(start)
        total = torch.zeros(padded(num_quantized), device=whole.device)
        exact_total = torch.zeros(ranges.numel - num_quantized, device=whole.device)
        for row in received:
            quantized, exact = split_range(row, ranges, start, self.exact_dtype)
            kernels.dequantize(quantized, ranges.form, total, adds=True)
            exact_total += exact
        return total, exact_total, start

    def _all_gather(self, total: Tensor, exact: Tensor, start: int, result: Tensor) -> None:
        """Quantize and all-gather transformed sums; all replicas dequantize equal bytes."""
        rank, span, ranges = self.groups.rank, self.replicas, self.ranges
        kernels = choose_kernels(result.device)
        chunks = result.view(-1, ranges.numel)
        row_of_rank, _ = nested_range(span, rank, len(chunks))
        gathered = result.new_zeros(len(chunks), ranges.range_bytes, dtype=torch.uint8)
        payload = gathered[row_of_rank]
        quantized, exact_sent = split_range(payload, ranges, start, self.exact_dtype)
        kernels.quantize(total, ranges.form, quantized)
        exact_sent.copy_(exact)
        for depth in reversed(range(len(span))):
            rows = gathered[slice(*nested_range(span[:depth], rank, len(chunks)))].view(-1)
            wire = Wire(self.groups, StreamKind.EXCHANGE, (span[depth],))
            wire.all_gather(rows, wire.row(rows))
        begin = start - row_of_rank * ranges.numel
        for row, values in zip(gathered, chunks, strict=True):
            quantized, exact = split_range(row, ranges, begin, self.exact_dtype)
            total = torch.zeros(padded(ranges.num_quantized(begin)), device=result.device)
            kernels.dequantize(quantized, ranges.form, total)
            _write(values, hadamard(total) / PAD, exact)
            begin += ranges.numel


def _write(result: Tensor, sums: Tensor, exact: Tensor) -> None:
    num_quantized = result.numel() - exact.numel()
    result[:num_quantized] = sums[:num_quantized]
    result[num_quantized:] = exact
