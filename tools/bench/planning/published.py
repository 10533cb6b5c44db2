"""What PaRO's paper reports, and what the planner predicts for the same workloads."""

# dgx-a100-roce100, LLaMA in bf16 with bf16 accumulators, 65B with full recomputation, sequences of
# 512. Nothing overlaps, as in the released code, and a collective over all ranks is one flat ring,
# as DeepSpeed's baselines use. In the main tables the micro-batch is 4, with 10 of them a step;
# where the batch is "dynamic" (R11, R12), 540 samples per rank and step in the largest
# micro-batches that fit. The prediction with overlap is given as well.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from model.lora_config import LoraConfig, targets_of
from paro.planning.search.estimator import Estimate
from paro.planning.search.search_space import Workload
from paro.planning.search.trainable import Trainable, TrainableKind
from tools.bench.planning.figure import Figure, case_on, estimate, model_of, with_room_for

LAST = Trainable(kind=TrainableKind.LAST_BLOCKS, share=1 / 16)
PEFT = LoraConfig(rank=16, targets=targets_of("all-linear"))  # 0.31% of 65B
USABLE = 77 * 10**9  # bytes in the search for the largest micro-batches: all but 3 GB
SAMPLES = 540  # per rank and step, of R11; R12 does not give the number


def paro_case(preset: str, ranks: int = 32, **changes: Any) -> Workload:
    given: dict[str, Any] = {
        "seq_length": 512, "micro_batch_size": 4, "micro_batches": 10, "prefetch_units": 0,
        "collective": "flat",
    }  # fmt: skip
    model = replace(model_of(preset, recomputed=preset == "65B"), lora=changes.pop("lora", None))
    return with_room_for(case_on("dgx-a100-roce100", model, ranks, **(given | changes)), USABLE)


def ratio(workload: Workload, slower: str, faster: str) -> float:
    return estimate(workload, slower).seconds / estimate(workload, faster).seconds


def paro_figures() -> Iterator[Figure]:
    yield from _main_tables()
    yield from _dynamic_batches()
    yield from _partial()
    yield from _scaling()


def _both(workload: Workload, measure: Callable[[Workload], float]) -> dict[str, Any]:
    return {"ours": measure(workload), "overlapped": measure(replace(workload, prefetch_units=1))}


def _over(slower: str, faster: str, workload: Workload) -> float:
    return ratio(workload, slower, faster)


def _main_tables() -> Iterator[Figure]:
    for name, preset, slower, faster, published in (
        ("R1", "7B", "GGG", "IIG", 2.28),
        ("R2", "7B", "NGG", "NII", 1.67),
        ("R3", "65B", "GGG", "IIG", 1.86),
    ):
        other = {"GGG": "ZeRO-3", "NGG": "ZeRO-2"}[slower]
        yield Figure(
            name=name, what=f"{preset}, {faster} over {other}", published=published,
            **_both(paro_case(preset), partial(_over, slower, faster)),
        )  # fmt: skip


class Dynamic(NamedTuple):
    """A strategy with the largest micro-batches that fit."""

    size: int
    estimate: Estimate

    @property
    def samples_per_second(self) -> float:
        """Samples per second of a rank."""
        return SAMPLES / self.estimate.seconds


@cache
def dynamic(preset: str, ranks: int, strategy: str, *, overlaps: bool = False) -> Dynamic:
    sizes = [size for size in range(SAMPLES, 0, -1) if SAMPLES % size == 0]
    for size in sizes:
        workload = paro_case(
            preset, ranks, micro_batch_size=size, micro_batches=SAMPLES // size,
            prefetch_units=1 if overlaps else 0,
        )  # fmt: skip
        found = estimate(workload, strategy)
        if found.fits:
            return Dynamic(size, found)
    raise AssertionError(f"{strategy} does not fit {preset}")


def _dynamic_batches() -> Iterator[Figure]:
    def gain(preset: str, ranks: int, slower: str, faster: str) -> dict[str, Any]:
        measured = {
            name: dynamic(preset, ranks, slower, overlaps=overlaps).estimate.seconds
            / dynamic(preset, ranks, faster, overlaps=overlaps).estimate.seconds
            for name, overlaps in (("ours", False), ("overlapped", True))
        }
        return dict(measured)

    nni, zero1 = (dynamic("7B", 32, name) for name in ("NNI", "NNG"))
    often = ratio(paro_case("7B", micro_batches=SAMPLES // 4), "NGG", "NNI")
    yield Figure(
        name="R11", what="7B, NNI over ZeRO-1, dynamic batch", published=1.487,
        **gain("7B", 32, "NNG", "NNI"),
        note=f"ours: micro-batches of {nni.size} and {zero1.size}. Both send once a step. NNI "
        f"computes for {nni.estimate.timeline.compute_seconds:.0f} s a step here, 49% of which no "
        f"cost at its end can be: ZeRO-1 waits {zero1.estimate.timeline.exposed_seconds:.1f} s in "
        "all. It would take something in every micro-batch; a reduction in every micro-batch of 4 "
        f"gives {often:.2f}, but ZeRO-1 makes none, nor does the DeepSpeed that was released",
    )  # fmt: skip
    iig, zero3 = (dynamic("65B", 64, name) for name in ("IIG", "GGG"))
    yield Figure(
        name="R12", what="65B on 64 GPUs, IIG over ZeRO-3, dynamic batch", published=0.62 / 0.47,
        **gain("65B", 64, "GGG", "IIG"),
        note=f"its batch is not stated: R11's is taken. Ours: micro-batches of {iig.size} and "
        f"{zero3.size}, {iig.samples_per_second:.2f} and {zero3.samples_per_second:.2f} samples a "
        "second and GPU, where the paper has 0.62 and 0.47 in a unit that it does not name. As "
        "samples a second and GPU, 0.62 takes 0.53 of the peak, more than the 0.45 assumed here; "
        "ZeRO-3's smaller states leave room for a larger micro-batch, which the paper may not "
        f"have used: at {iig.size} for both ours is "
        f"{ratio(_of_size('65B', 64, iig.size), 'GGG', 'IIG'):.2f}",
    )  # fmt: skip


def _of_size(preset: str, ranks: int, size: int) -> Workload:
    return paro_case(preset, ranks, micro_batch_size=size, micro_batches=SAMPLES // size)


def _partial() -> Iterator[Figure]:
    note = "which sixteenth trains is not stated: here the last blocks"
    for strategy, published in (("NIG", 1.15), ("NII", 1.21)):
        yield Figure(
            name="R5", what=f"7B, a sixteenth trains, {strategy} over ZeRO-2", published=published,
            tolerance=None,
            note=f"{note}. In bytes level by level NIG and NII are equal; what NIG gathers as one "
            "flat ring sets them apart, by less than in the paper",
            **_both(paro_case("7B", trainable=LAST), partial(_over, "NGG", strategy)),
        )  # fmt: skip
    for strategy, published in (("III", 2.64), ("IIG", 2.66)):
        yield Figure(
            name="R6", what=f"65B, a sixteenth trains, {strategy} over ZeRO-3", tolerance=None,
            published=published, note=f"{note}; the paper's words allow 3.64 and 3.66 too",
            **_both(paro_case("65B", trainable=LAST), partial(_over, "GGG", strategy)),
        )  # fmt: skip
    yield Figure(
        name="R7", what="65B, adapters of 3/1000, ING over ZeRO-3", published=1.44, tolerance=None,
        note="nearly all that is sent are gathers of frozen parameters, which R3 has too: why the "
        "paper gains less here than there is not known",
        **_both(paro_case("65B", lora=PEFT), partial(_over, "GGG", "ING")),
    )  # fmt: skip


def _scaling() -> Iterator[Figure]:
    def scaled(collective: str, strategy: str, workload: Workload) -> float:
        ahead = workload.prefetch_units
        cases = (
            paro_case("7B", ranks, prefetch_units=ahead, collective=collective)
            for ranks in (16, 128)
        )
        few, many = (estimate(case, strategy).seconds for case in cases)
        return few / many

    published = {"IIG": 0.92, "NIG": 0.84, "NGG": 0.63, "GGG": 0.63}
    levels = ", ".join(f"{scaled('native', name, paro_case('7B')):.2f}" for name in published)
    for strategy, efficiency in published.items():
        yield Figure(
            name="R10", what=f"7B, {strategy}: efficiency from 16 to 128 GPUs",
            published=efficiency, tolerance=None,
            **_both(paro_case("7B"), partial(scaled, "flat", strategy)),
            note="over a node's link a flat ring sends 15/16 of a buffer on 2 nodes and 127/128 on "
            "16, and ZeRO-3 sends three times what ZeRO-2 does: what both lose equally is not in "
            f"bytes. Level by level (1/2 and 15/16 of a buffer) ours would be {levels}",
        )  # fmt: skip


def feasible() -> dict[str, bool]:
    """R4: which strategies that the paper names fit 65B on 32 devices of 80 GB."""
    workload = paro_case("65B")
    names = ("NGG", "NII", "NIG", "III", "IIG", "IGG", "GGG")
    return {name: estimate(workload, name).fits for name in names}
