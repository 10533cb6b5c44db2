"""Parts that measure: memory against its prediction, speed, a profile, checkpoints."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paro.errors import count_text
from tools.bench.gpu_check.running import Outcome, Runner
from tools.bench.shared.clocks import CLOCKS

_MB = 2**20
_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0 --lr 1e-4"
_SMALL_SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 176 --seq-length 64"
)
_BLOCK = "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size"
_7B = f"{_BLOCK} 11008 --vocab-size 32000"
_8B = f"{_BLOCK} 14336 --vocab-size 128256 --num-query-groups 8"
_MEMORY_CASES = {  # flags; sequences in a micro-batch; micro-batches
    "bf16": ("--bf16", 1, 1),
    "bf16, 4 micro-batches": ("--bf16", 1, 4),
    "bf16, two sequences": ("--bf16", 2, 1),
    "bf16, full recomputation": ("--bf16 --recompute-granularity full", 1, 1),
    "bf16, selective recomputation": ("--bf16 --recompute-granularity selective", 1, 1),
    "bf16, compiled": ("--bf16 --torch-compile inductor", 1, 1),
    "fp32": ("", 1, 1),
}
_MEMORY_TOLERANCE = 0.1  # as in tests/paro/planning/test_gathering.py, on a GPU
_SLOWDOWN = """
import json, pathlib, sys, torch
from paro.measuring.slowdown import slowed_matmuls
curve = slowed_matmuls(torch.device("cuda"))
print(*(f"{n} busy thread blocks: {times:.3f} times as long" for n, times in curve), sep=chr(10))
pathlib.Path(sys.argv[-1]).write_text(json.dumps(curve))
"""


class Shape(NamedTuple):
    """Flags of bench_model.py, with as many blocks as fit; contenders, the rehearsed one first."""

    flags: str
    contenders: str = "trainer"
    blocks: int = 12  # of LLaMA-7B: more change MFU little, and take long to draw
    rounds: int = 3


_65K = f"{_7B} --seq-length 4096 --micro-batch-size 2 --num-micro-batches 8"
_8K = f"{_7B} --seq-length 8192 --micro-batch-size 1 --num-micro-batches 8"
_IN_BF16 = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --num-micro-batches 4"
_64K = f"{_7B} --seq-length 65536 --micro-batch-size 1 --recompute"
_KEPT = "--paro-recompute-keep core_attn"
SHAPES = {  # a part's time is divided among its shapes, and theirs among contenders
    # What the page begins with.
    "speed": [Shape(_65K, "trainer,trainer-fp8-compiled,ours,transformers-fused")],
    "variants": [Shape(_65K, "trainer-fp8,trainer-compiled,ours-compiled,transformers-compiled")],
    "muon": [Shape(_65K, "trainer-muon,trainer")],
    "fp8": [Shape(_8K, "trainer-fp8-compiled,trainer")],
    "7B": [Shape(f"{_7B} --seq-length 4096 --micro-batch-size 2 {_IN_BF16}", blocks=32)],
    "8B": [Shape(f"{_8B} --seq-length 8192 --micro-batch-size 1 {_IN_BF16}", blocks=32)],
    "64k": [Shape(_64K, blocks=8, rounds=2), Shape(f"{_64K} {_KEPT}", blocks=8, rounds=2)],
    "128k": [Shape(_64K.replace("65536", "131072"), blocks=4, rounds=1)],
}
_7B_ALONE = "--llama-preset 7B --seq-length 4096 --micro-batches 4"
_65B_ALONE = "--llama-preset 65B --seq-length 4096 --micro-batches 2 --recompute"
_CLUSTERS = [
    f"--ranks 128 {_65B_ALONE} --contenders paro:IIG,fsdp2",
    *(f"--ranks {ranks} {_7B_ALONE}" for ranks in (32, 8, 128)),
    *(f"--ranks {ranks} {_65B_ALONE}" for ranks in (32, 128)),
]
_CLUSTER_SECONDS = 100.0  # left: with less no other is begun


def memory(runner: Runner) -> Outcome:
    """Return allocated and reserved memory against the prediction."""
    cases = list(_MEMORY_CASES)[: 1 if runner.rehearse else None]
    return joined([_memory(runner, f"memory-{index}", title) for index, title in enumerate(cases)])


def _memory(runner: Runner, name: str, title: str) -> Outcome:
    flags, size, count = _MEMORY_CASES[title]
    words = _training(runner, iterations=3, size=size, count=count)
    ended = runner.run(name, [*words, *flags.split()])
    match = re.search(r"memory \(MB\) \| (.*)", ended.output)
    if ended.failure or not match:
        return Outcome(passed=False, lines=(f"{title}: {ended.failure or 'no memory line'}",))
    pairs = (part.split(": ") for part in match[1].split(" | "))
    figures = {key: round(float(value) * _MB) for key, value in pairs}
    failure = memory_failure(figures)
    line = f"{title}: {_memory_text(figures)}{f': failed: {failure}' * bool(failure)}"
    return Outcome(passed=failure is None, lines=(line,), figures={title: figures})


def memory_failure(figures: Mapping[str, int]) -> str | None:
    """Say how a GPU's memory contradicts its prediction; None if it agrees, and on a CPU.

    Too little is predicted if torch's allocator holds more than the prediction with its share for
    fragmentation (planning/run_memory.py), which covers library workspaces too. Too much is, if
    tensors take less than the prediction by more than the tests of the prediction allow on a GPU.
    """
    if "max reserved" not in figures:
        return None
    if figures["max reserved"] > figures["predicted reserved"]:
        return f"more is reserved than the {figures['predicted reserved'] / 1e9:.2f} GB predicted"
    if figures["max allocated"] < (1 - _MEMORY_TOLERANCE) * figures["predicted peak"]:
        return f"more than {_MEMORY_TOLERANCE:.0%} below the prediction"
    return None


def _memory_text(figures: Mapping[str, int]) -> str:
    used = figures.get("max allocated", figures.get("max resident", 0))
    share = used / figures["predicted peak"] - 1
    text = f"{used / 1e9:.2f} GB at most, {share:+.1%} from the prediction"
    if "max reserved" in figures:
        text += f", {figures['max reserved'] / 1e9:.2f} GB reserved"
    return text


def muon(runner: Runner) -> Outcome:
    """Time Newton-Schulz of a 7B model's matrices, and Muon's step next to AdamW's."""
    words: list[object] = ["tools/bench/bench_newton_schulz.py"]
    words += ["--shapes", "64x64", "--rounds", 1] if runner.rehearse else []
    products = runner.measured("newton-schulz", words, alone=True).outcome("newton_schulz")
    outcome = joined([products, speed(runner, "muon")])
    rows = {row["contender"]: row for row in outcome.figures.get("rows", ())}
    adamw, muon = (rows.get(n, {}).get("tokens_per_second") for n in ("trainer", "trainer-muon"))
    if adamw and muon:
        line = f"a step takes {adamw / muon:.3f} times as long as with AdamW"
        outcome = replace(outcome, lines=(*outcome.lines, line))
    return outcome


def kernels(runner: Runner) -> Outcome:
    """Time attention by cuDNN and FlashAttention, and a matmul next to busy thread blocks."""
    flags = "--seq-lengths 32 --device cpu" if runner.rehearse else "--device cuda"
    words = ["tools/bench/bench_attention.py", *flags.split()]
    outcomes = [runner.measured("attention", words, alone=True).outcome("attention")]
    if not runner.rehearse:  # a CPU has no thread blocks
        outcomes += [runner.measured("slowdown", ["-c", _SLOWDOWN], alone=True).outcome("slowdown")]
    return joined(outcomes)


def one_rank(runner: Runner) -> Outcome:
    """Train one real rank of several clusters, as many as there is time for."""
    shapes = _CLUSTERS
    outcomes: list[Outcome] = []
    if runner.rehearse:
        shapes = ["--ranks 16 --micro-batches 1 --num-attention-heads 8"]
    for number, shape in enumerate(shapes):
        if outcomes and runner.seconds_left < _CLUSTER_SECONDS:
            outcomes.append(Outcome(passed=True, lines=(f"not reached: {shape}",)))
            continue
        words = f"tools/bench/one_rank.py --machine dgx-h100 --rounds 1 {shape}"
        words += f" --warmup-steps 2 --steps 1 --distributed-backend {runner.backend}"
        ended = runner.measured(f"one-rank-{number}", words.split(), alone=True)
        outcome = ended.outcome(f"one rank: {shape}")
        outcomes.append(replace(outcome, lines=(shape, *outcome.lines)))
    return joined(outcomes)


def speed(runner: Runner, name: str) -> Outcome:
    """Measure the MFU of the contenders of the shapes of this name."""
    shapes, rows, outcomes = SHAPES[name], [], []
    for number, shape in enumerate(shapes):
        share = runner.seconds_left / (len(shapes) - number)
        outcomes.append(_speed(runner, f"{name}-{number}" if number else name, shape, share))
        rows += [{**row, "flags": shape.flags} for row in outcomes[-1].figures.get("rows", ())]
    return joined(outcomes, rows=rows)


def joined(outcomes: Sequence[Outcome], **figures: object) -> Outcome:
    """Join outcomes of one part; `figures` replace theirs of equal names."""
    return Outcome(
        passed=all(outcome.passed for outcome in outcomes),
        lines=tuple(line for outcome in outcomes for line in outcome.lines),
        figures={name: value for outcome in outcomes for name, value in outcome.figures.items()}
        | figures,
        pictures=tuple(picture for outcome in outcomes for picture in outcome.pictures),
    )


def _speed(runner: Runner, title: str, shape: Shape, seconds: float) -> Outcome:
    names = shape.contenders.split(",")[: 1 if runner.rehearse else None]
    left_out = [name for name in names if "fp8" in name and not runner.has_fp8]
    names = [name for name in names if name not in left_out]
    words = f"--own-process --contenders {','.join(names)} {shape.flags}"
    words += f" --clocks {runner.folder / CLOCKS}"
    if runner.rehearse:
        words += f" {_SMALL_SIZES} --num-query-groups 4 --vocab-size 512 --num-micro-batches 2"
        words += " --rounds 2 --steps 10 --peak-tflops 0.1"  # as long as some samples of clocks
    else:
        words += f" --num-layers {num_layers_that_fit(shape, runner.device_bytes)} --dtype bf16"
        words += f" --device cuda --rounds {shape.rounds} --steps 1"
        words += f" --most-seconds {0.98 * seconds / len(names):.0f}"
    ended = runner.measured(title, ["tools/bench/bench_model.py", *words.split()], alone=True)
    if ended.figures is None:
        return ended.outcome("")
    rows = ended.figures["rows"]
    lines = (f"{ended.figures['task']}: {shape.flags}", *(row["line"] for row in rows))
    if left_out:
        lines += (f"{' and '.join(left_out)}: left out, it needs compute capability 8.9",)
    return Outcome(passed=ended.status == 0, lines=lines, figures=ended.figures)


def num_layers_that_fit(shape: Shape, device_bytes: int) -> int:
    """Count the blocks, at most the shape's, that fit a GPU by the memory prediction."""
    from paro.planning.run_memory import RunMemory
    from tools.bench.bench_model import make_parser, task_of

    for number in range(shape.blocks, 1, -1):
        words = [*shape.flags.split(), "--dtype", "bf16", "--num-layers", str(number)]
        run = task_of(make_parser().parse_args(words)).run
        if RunMemory(None).of(replace(run.spec, device_type="cuda")).total <= device_bytes:
            return number
    return 1


def profile(runner: Runner) -> Outcome:
    """Return a profile of steps, drawn by stream."""
    folder = runner.folder / "profile"
    shutil.rmtree(folder, ignore_errors=True)
    flags = (
        "--bf16 --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5 "
        "--profile-ranks 0 --tensorboard-dir"
    )
    words = [*_training(runner, iterations=6, count=2), *flags.split(), folder]
    ended = runner.run("profile-steps", words)
    traces = sorted(folder.glob("*.pt.trace.json*"))
    if ended.failure or not traces:
        return Outcome(passed=False, lines=(ended.failure or "no trace was written",))
    picture = "profile.png"
    words = ["tools/draw_profile.py", *traces, "--plot", runner.folder / picture]
    drawn = runner.measured("profile", words, alone=True).outcome("profile")
    lines = tuple(line for line in drawn.lines if not line.startswith("picture written"))
    return replace(drawn, lines=lines, pictures=(picture,) if drawn.passed else ())


def checkpoint(runner: Runner) -> Outcome:
    """Return the largest checkpoint that fits: saved, saved in the background of steps, loaded."""
    folder = runner.folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["tools/bench_checkpoint.py", "--folder", folder]
    num_params = 100_000 if runner.rehearse else _num_params_that_fit(runner)
    hidden_size = 64 if runner.rehearse else 4096
    sizes: list[object] = ["--params", num_params, "--hidden-size", hidden_size, "--rounds", 1]
    steps: list[object] = ["--steps", 1 if runner.rehearse else 6]
    outcomes = []
    for name, more in (("checkpoint", sizes), ("async-checkpoint", steps)):
        ended = runner.measured(name, [*words, *more], env={"OMP_NUM_THREADS": "1"})
        (runner.folder / f"{name}.json").unlink(missing_ok=True)
        line = f"{name}: {ended.problem}" if ended.problem else _summary(ended.figures)
        outcomes.append(replace(ended.outcome(name), lines=(line,)))
    shutil.rmtree(folder, ignore_errors=True)
    return joined(outcomes)


def _summary(figures: Mapping[str, Any]) -> str:
    """Format a line for one of bench_checkpoint.py's two measurements."""
    if "seconds_of_a_step" in figures:
        ratio = figures["seconds_of_a_step"]["ratio"]
        return f"a step during an asynchronous save takes {ratio:.2f} times as long as without"
    rates = figures["gb_per_second"]
    shown = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
    return f"{figures['bytes'] / 1e9:.2f} GB of {count_text(figures['ranks'], 'rank')}: {shown}"


def _num_params_that_fit(runner: Runner) -> int:
    """Count parameters whose 12 bytes fit twice on the disk, and twice in host memory."""
    from paro.report.memory import available_host_bytes  # with torch, which starts

    disk = shutil.disk_usage(runner.folder).free
    return int(0.8 * min(disk, available_host_bytes()) / 2 / 12)


def _training(runner: Runner, *, iterations: int, size: int = 1, count: int = 1) -> list[object]:
    """Return the words of a training: `count` micro-batches of `size` sequences."""
    shape = _SMALL_SIZES if runner.rehearse else f"{_7B} --seq-length 4096 --num-layers 8"
    batch = size * count * runner.num_gpus
    flags = f"{_DATA} {shape} --micro-batch-size {size} --global-batch-size {batch}"
    flags += f" --distributed-backend {runner.backend} --train-iters {iterations} --log-interval 1"
    return ["pretrain_llama.py", *flags.split()]


def collectives(runner: Runner) -> Outcome:
    """Time this backend's collectives over all GPUs, in either launch order; by copy engines."""
    outcomes = [_collectives(runner, order) for order in ("free", "implicit")]
    if not runner.rehearse:  # a CPU has none
        outcomes.append(_collectives(runner, "free", "--paro-nccl-copy-engine"))
    return joined(outcomes)


def _collectives(runner: Runner, order: str, *flags: str) -> Outcome:
    name = "".join([order, *flags])
    words = ["tools/bench_collectives.py", "--distributed-backend", runner.backend]
    words += ["--group-size", str(_group_size(runner))]
    words += ["--algorithms", "native,ho-ring,flat", "--paro-nccl-launch-order", order, *flags]
    if runner.rehearse:
        words += ["--sizes", "0.1M", "--rounds", "1"]
    picture = f"collectives-{name}.png"
    ended = runner.measured(f"collectives-{name}", [*words, "--plot", runner.folder / picture])
    outcome = ended.outcome(f"rows, {name}")
    lines = (f"launch order {' '.join([order, *flags])}:", *outcome.lines)
    return replace(outcome, lines=lines, pictures=(picture,) if outcome.passed else ())


def _group_size(runner: Runner) -> int:
    """Return the ranks of a group: half the GPUs."""
    return max(1, runner.num_gpus // 2)


def peers(runner: Runner) -> Outcome:
    """Time IIG, NIG and GGG next to FSDP2; IIG in other orders, and by copy engines."""
    contenders = "fsdp2,fsdp2-hybrid,paro:IIG,paro:NIG,paro:GGG,paro:IIG+at-once"
    contenders += ",paro:IIG+in-order,paro:IIG+in-order-at-once"
    contenders += "" if runner.rehearse else ",paro:IIG+copy-engine"  # a CPU has none
    return _compared(runner, "peers", contenders, "--seq-length 4096 --rounds 3")


def shared_samples(runner: Runner) -> Outcome:
    """Time GGG where ranks share samples in each way and in none: losses must be equal."""
    ways = []
    for size in (2, 4, 8):
        nests = math.gcd(size, _group_size(runner)) == min(size, _group_size(runner))
        if runner.num_gpus % size == 0 and nests:
            ways += [f"{kind}/{size}" for kind in ("p2p", "allgather", "a2a")]
            ways += [f"flat/{size}", f"a2a+p2p/2/{size // 2}"] * (size > 2)
    contenders = ",".join(["paro:GGG", *(f"paro:GGG+{way}" for way in ways)])
    flags = "--num-layers 8 --seq-length 32768 --micro-batches 1 --rounds 1"
    return _compared(runner, "shared-samples", contenders, flags)


def _compared(runner: Runner, name: str, contenders: str, flags: str) -> Outcome:
    """Compare contenders on GPUs with LLaMA-7B and `flags`."""
    words: list[object] = ["tools/bench/compare_peers.py", "--contenders", contenders]
    words += ["--distributed-backend", runner.backend]
    words += ["--group-size", _group_size(runner)]
    if runner.rehearse:
        words += ["--rounds", 1, "--micro-batches", 1, "--warmup-steps", 2, "--steps", 1]
        words += ["--num-attention-heads", 8]
    else:
        words += ["--llama-preset", "7B", "--recompute", *flags.split()]
    return runner.measured(name, words).outcome("figures")
