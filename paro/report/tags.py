"""Dashboard tags of an iteration: Megatron's, and ours as `panel/figure`."""

from __future__ import annotations

from dataclasses import asdict

from paro.report.record import IterationRecord, Metrics, RunFacts

# Ours, by panel. Two conventions of MFU are in use, so both names state the convention.
TOKENS_PER_SECOND = "throughput/tokens-per-second"
TOKENS_PER_SECOND_PER_DEVICE = "throughput/tokens-per-second-per-device"
TFLOPS_PER_DEVICE = "throughput/tflops-per-device"
MFU = "throughput/mfu-attention-in-full"
MFU_CAUSAL = "throughput/mfu-causal-attention-halved"


def scalars_of(
    record: IterationRecord, metrics: Metrics, facts: RunFacts, *, totals: dict[str, int]
) -> dict[str, float]:
    """Tags and values of one iteration; values that were not measured have no tag."""
    planned = {} if facts.planned is None else facts.planned.seconds
    return {
        **_training(record, facts),
        **_throughput(record, metrics, facts),
        **_memory(record, metrics, facts),
        **_communication(record),
        # To draw beside the iteration's time and its exposed communication.
        **{f"planned/{name}-ms": seconds * 1000.0 for name, seconds in planned.items()},
        "data/wait-ms": record.data_wait_ms,
        **{f"steps/{name}": number for name, number in totals.items()},
    }


def _training(record: IterationRecord, facts: RunFacts) -> dict[str, float]:
    found = {
        "learning-rate": record.learning_rate,
        "batch-size": record.global_batch_size,
        "loss-scale": record.loss_scale,
        "world-size": facts.world_size,
    }
    if record.has_tokens:
        found["grad-norm"] = record.grad_norm
    if not record.skipped:
        found["lm loss"] = record.lm_loss
    for tag, value in (("num-zeros", record.num_zeros), ("params-norm", record.params_norm)):
        if value is not None:
            found[tag] = value
    return found


def _throughput(record: IterationRecord, metrics: Metrics, facts: RunFacts) -> dict[str, float]:
    return {
        "iteration-time": record.iteration_time_ms / 1000.0,
        "throughput": metrics.tflops_per_device,
        TOKENS_PER_SECOND: metrics.tokens_per_second,
        TOKENS_PER_SECOND_PER_DEVICE: metrics.tokens_per_second / facts.world_size,
        TFLOPS_PER_DEVICE: metrics.tflops_per_device,
        MFU: metrics.mfu,
        MFU_CAUSAL: metrics.mfu_causal,
    }


def _memory(record: IterationRecord, metrics: Metrics, facts: RunFacts) -> dict[str, float]:
    found: dict[str, float] = {
        "mem-max-allocated-bytes": metrics.peak_memory_bytes,
        "memory/peak-measured-bytes": metrics.peak_memory_bytes,
        "memory/model-states-bytes": facts.model_state_bytes,
    }
    found |= {f"mem-{name}": number for name, number in record.allocator.items()}
    if metrics.peak_reserved_bytes is not None:
        found["memory/peak-reserved-bytes"] = metrics.peak_reserved_bytes
    found |= {f"memory/measured-{kind}-bytes": size for kind, size in record.held.items()}
    found |= {f"memory/predicted-{kind}-bytes": size for kind, size in facts.predicted.items()}
    return found


def _communication(record: IterationRecord) -> dict[str, float]:
    found: dict[str, float] = {
        "communication/intra-bytes": record.intra_bytes,
        "communication/inter-bytes": record.inter_bytes,
    }
    for name, seconds in asdict(record.exposed).items():
        if seconds is not None:
            found[f"communication/exposed-{name}-ms"] = seconds * 1000.0
    return found
