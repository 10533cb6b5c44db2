"""The host waits for the GPU a known number of times, streams for each other; kernels compile."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model import fusion
from model.llama import Block
from paro.checkpoint import background
from paro.collectives import wire
from paro.distributed import comm_stream, groups
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.optim import adamw, muon
from paro.quantization import blocks
from paro.strategy import legal_letters
from paro.training import step
from paro.training.assembly import build_training
from paro.training.evaluation import evaluate
from tests.helpers.fake_cuda import GPU, Note, Recorder, build, fake_cuda, noted, run_apart
from tests.helpers.training import TINY, begun, configured
from tests.helpers.triton_kernels import CAPABILITIES
from tests.paro.planning.cases import silence

pytestmark = [pytest.mark.process, pytest.mark.compiler]

# How often the host waits for the GPU at the end of a step, and of an evaluation.
WAITS_OF_A_STEP = 1
WAITS_OF_THE_PARAMS_NORM = 1  # --log-params-norm, after the update
WAITS_OF_OFFLOAD = 1  # for what is copied to the host in an update
WAITS_OF_AN_EVALUATION = 1

MICRO_BATCHES = 2
FLAGS = (
    f"{TINY.replace('gloo', 'nccl')} --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 "
    "--seq-length 16 --train-iters 3"
)
FLASH = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
CUDNN = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
KERNELS = (
    *("_swiglu", "_swiglu_backward", "_rotate", "_norm_backward", "_cross_entropy"),
    "_adamw",
)
FULL, UNFUSED = "--recompute-granularity full", "--attention-backend unfused"
OFFLOAD = "--optimizer-cpu-offload"
ROTATE = "--bf16 --paro-strategy IIG --paro-materialize rotate"
DOCUMENTS = "--bf16 --vocab-size 5 --reset-position-ids --reset-attention-mask --eod-mask-loss"


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and the operations of GPUs that show that it takes their path, or does not."""

    flags: str
    uses: Sequence[str] = ()
    avoids: Sequence[str] = ()
    copies: int = 3  # to the GPU, of a micro-batch: tokens, labels, weights
    waits: int = WAITS_OF_A_STEP
    rank: int | None = 0  # of 4 in 2 groups; None: of a world of one


# The last rank holds only replicas of the optimizer's ranges, with some letters.
STRATEGIES = {
    letters: Case(f"--bf16 --paro-strategy {letters}", rank=3) for letters in legal_letters()
}
KINDS = {
    "one GPU": Case("--bf16", (*FLASH, *KERNELS, "mm.dtype_out", "addmm.dtype_out"), rank=None),
    "fp32": Case("", ("_scaled_dot_product_efficient_attention_backward",)),
    "fp16": Case("--fp16", FLASH),
    "fp8, e4m3": Case("--bf16 --fp8-format e4m3", ("_scaled_mm",)),
    "fp8, hybrid": Case(
        "--bf16 --fp8-format hybrid",
        ("_scaled_mm", "_largest", "_norm", "_cast", "e4m3x2", "e5m2x2"),
    ),
    "without Triton": Case(
        "--bf16 --no-bias-swiglu-fusion --no-rope-fusion --adam-implementation torch",
        ("_fused_adamw_",),
    ),
    "unfused attention": Case(f"--bf16 {UNFUSED}", ("_safe_softmax",)),
    "grouped heads, QK norms and biases, a tied head": Case(
        "--bf16 --group-query-attention --num-query-groups 1 --qk-layernorm --add-qkv-bias "
        "--tie-embeddings-and-output-weights",
        FLASH,
    ),
    "full recomputation": Case(f"--bf16 {FULL}", FLASH),
    "attention that is kept": Case(f"--bf16 {FULL} --paro-recompute-keep core_attn", CUDNN),
    "selective recomputation": Case("--bf16 --recompute-granularity selective", FLASH),
    "documents": Case(
        DOCUMENTS, ("_flash_attention_forward", "_flash_attention_backward"), copies=5
    ),
    "documents, unfused": Case(f"{DOCUMENTS} {UNFUSED}", ("_safe_softmax",), copies=5),
    "LoRA": Case("--bf16 --lora-rank 2 --lora-dropout 0.1 --lora-target-modules all-linear"),
    "rotation": Case(ROTATE),
    "rotation in place": Case(f"{ROTATE} --paro-rotate-in-place"),
    "rotation, moments in bf16": Case(
        f"{ROTATE} --exp-avg-dtype bf16",
        ("_adamw divides in 64 bits",),
        rank=3,
    ),
    "4 bits between groups": Case(
        "--bf16 --paro-strategy NIG --paro-inter-param-bits 4 --paro-inter-grad-bits 4 "
        "--hidden-size 64 --ffn-hidden-size 160",
        ("_quantize", "_dequantize"),
    ),
    "8 bits between groups, moments in bf16": Case(
        "--bf16 --paro-strategy NIG --paro-inter-param-bits 8 --paro-inter-grad-bits 8 "
        "--paro-inter-grad-error-feedback --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
        "--hidden-size 64 --ffn-hidden-size 160",
        ("_quantize", "_dequantize", "_adamw"),
        avoids=("_adamw divides in 64 bits",),
    ),
    "Muon": Case(
        "--bf16 --optimizer muon --muon-num-ns-steps 2 --exp-avg-dtype bf16 --paro-strategy ING",
        (*FLASH, *KERNELS, "mm.dtype_out", "addmm.dtype_out", "_square", "_momentum"),
    ),
    "states in host memory": Case(
        f"{OFFLOAD} --bf16 --ema-decay 0.9", ("_adamw",), waits=WAITS_OF_A_STEP + WAITS_OF_OFFLOAD
    ),
    "HO-Ring": Case("--bf16 --paro-strategy GGG --paro-collective ho-ring"),
    "flat": Case("--bf16 --paro-strategy GGG --paro-collective flat"),
    "tokens weigh alike, bf16 gradients, logged": Case(
        "--bf16 --calculate-per-token-loss --grad-reduce-in-bf16 --log-num-zeros-in-grad "
        "--log-params-norm",
        waits=WAITS_OF_A_STEP + WAITS_OF_THE_PARAMS_NORM,
    ),
}
COMPILED = {
    "compiled": Case("--bf16 --torch-compile aot_eager", (*FLASH, "write_weight_grad")),
    "compiled, documents": Case(
        f"{DOCUMENTS} --torch-compile aot_eager",
        ("_flash_attention_forward", "write_weight_grad"),
        copies=5,
    ),
    "compiled, fp8": Case("--bf16 --fp8-format hybrid --torch-compile aot_eager", ("_scaled_mm",)),
}
CASES = STRATEGIES | KINDS | COMPILED
# `make verify` has all, for all GPUs.
FEW = ("IIG",)
ONE_BLOCK = Case("--bf16 --paro-strategy IIG --num-layers 1", rank=3)
FEW_GPUS = (90,)


# In a process with a fake GPU #


@contextmanager
def lone_gpu(recorder: Recorder) -> Iterator[None]:
    """Collectives without peers, on the GPU's tensors; kernels that need not show their values."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        silence(monkeypatch)
        for owner, name in (
            (wire, "_all_gather"),
            (wire, "_reduce_scatter"),
            (dist, "all_reduce"),
            (dist, "all_to_all_single"),
            (dist, "P2POp"),
        ):
            writes = int(name != "P2POp")  # what one sends; a receive fills it below
            monkeypatch.setattr(owner, name, noted(recorder, getattr(owner, name), writes))
        monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
        monkeypatch.setattr(dist, "destroy_process_group", lambda _group: None)
        monkeypatch.setattr(groups, "_nccl_options", lambda *_, **__: None)
        monkeypatch.setattr(background, "pin", recorder.lock)
        for chooses in (fusion, adamw, blocks, muon):
            monkeypatch.setattr(chooses, "_compare", lambda *_: None)
        yield


def run(case: Case, recorder: Recorder) -> tuple[list[Note], list[Note], list[Note]]:
    """The notes of a second step's micro-batches, of its end, and of an evaluation."""
    rank = case.rank
    world = World() if rank is None else World(rank=rank, size=4, local_rank=rank, ranks_per_node=4)
    words = f"{FLAGS} --global-batch-size {MICRO_BATCHES * world.size} {case.flags}"
    words += "" if rank is None else " --paro-group-size 2"
    config = configured(words, world)
    training = build_training(config, PlannedControl(world, GPU))
    state, source = begun(config, training)
    forward_backward, after = step._forward_backward, []

    def marked(*args: Any) -> Tensor:
        loss = forward_backward(*args)
        after.append(len(recorder.notes))
        return loss

    with patch.object(step, "_forward_backward", marked):
        step.train_step(training, state, source)
        begin = len(recorder.notes)
        result = step.train_step(training, state, source)
    end = len(recorder.notes)
    assert not result.skipped
    evaluate(training, source, MICRO_BATCHES)
    notes = list(recorder.notes)
    training.close()
    return notes[begin : after[1]], notes[after[1] : end], notes[end:]


def problems_of(case: Case, capabilities: tuple[int, ...] = CAPABILITIES) -> list[str]:
    """What a run on a GPU should not do, with the lines of code that do it."""
    # A graph has nodes of the CPU too, which backward would run beside those of the GPU in another
    # thread; the state of fake tensors is not made for two.
    threads = torch.autograd.set_multithreading_enabled("--torch-compile" not in case.flags)
    with fake_cuda(capabilities) as recorder, lone_gpu(recorder), threads:
        try:
            during, end, evaluation = run(case, recorder)
        except Exception:
            return [*map(str, recorder.notes[-1:]), traceback.format_exc()]
    found = counted(during, "wait")
    for notes in (during, end, evaluation):
        found += counted(notes, "mix") + counted(notes, "race")
    for what, kind, notes, promised in (
        ("waits at the end of a step", "wait", end, case.waits),
        ("waits in an evaluation", "wait", evaluation, WAITS_OF_AN_EVALUATION),
        ("copies to the GPU in a step", "copy", during, case.copies * MICRO_BATCHES),
    ):
        number = sum(note.kind == kind for note in notes)
        if number != promised:
            found += [f"{number} {what}, not {promised}:", *counted(notes, kind)]
    seen = {part for name in recorder.operations for part in (name, name.partition(".")[2])}
    seen |= {part for name in recorder.operations for part in name.split(".")}
    found += [f"{name} was not used" for name in case.uses if name not in seen]
    return found + [name for name in case.avoids if name in seen]


def counted(notes: Sequence[Note], kind: str) -> list[str]:
    lines = Counter(str(note) for note in notes if note.kind == kind)
    return [f"{times} x {line}" for line, times in lines.items()]


def problems(
    names: Sequence[str], capabilities: tuple[int, ...] = CAPABILITIES
) -> dict[str, list[str]]:
    found = {name: problems_of(CASES[name], capabilities) for name in names}
    return {name: lines for name, lines in found.items() if lines}


# Mistakes in a block #


def reads_a_number(out: Tensor) -> Tensor:
    return out * out.sum().item()


def reads_a_number_in_backward(out: Tensor) -> Tensor:
    out.requires_grad and out.register_hook(lambda grad: grad * float(grad.sum()))
    return out


def copies_from_the_host(out: Tensor) -> Tensor:
    return out * torch.tensor(2.0, device=out.device)


def counts_a_mask(out: Tensor) -> Tensor:
    return out + out[out > 0].sum()


READS = "wait: aten._local_scalar_dense.default"
MISTAKES: dict[Callable[[Tensor], Tensor], str] = {
    reads_a_number: READS,
    reads_a_number_in_backward: READS,
    copies_from_the_host: "wait: copy of () to the GPU",
    counts_a_mask: "wait: aten.index.Tensor",
}


def problems_without_and_with_mistakes(
    names: Sequence[str],
) -> tuple[dict[str, list[str]], list[str]]:
    """Those of these cases, and those of runs whose blocks have the mistakes in the MLP.

    Computing does not wait for communication either, in the first of them.
    """
    without, mlp, found = problems(names, FEW_GPUS), Block.mlp, []

    def mistaken(mistakes: Sequence[Callable[[Tensor], Tensor]]) -> Callable[..., Tensor]:
        def wrong(block: Block, *args: Any) -> Tensor:
            out: Tensor = mlp(block, *args)
            for mistake in mistakes:
                out = mistake(out)
            return out

        return wrong

    together = [each for each in MISTAKES if each is not counts_a_mask]  # which ends a run
    with (
        patch.object(Block, "mlp", mistaken(together)),
        patch.object(comm_stream._StreamEvent, "wait", lambda _event: None),
    ):
        found += problems_of(ONE_BLOCK, FEW_GPUS)
    with patch.object(Block, "mlp", mistaken([counts_a_mask])):
        found += problems_of(ONE_BLOCK, FEW_GPUS)
    return without, found


# Tests #


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    cache = pytestconfig.cache
    assert cache is not None
    return build(cache.mkdir("fake_cuda"))


def listed(found: dict[str, list[str]]) -> str:
    return "\n".join(line for name, lines in found.items() for line in (name, *lines))


def check(library: Path, names: Sequence[str]) -> None:
    found = run_apart(library, __name__, "problems", list(names))
    assert not found, listed(found)


def curve(_: object) -> list[Any]:
    with fake_cuda() as recorder:
        from paro.measuring.slowdown import slowed_matmuls

        return [slowed_matmuls(GPU), *sorted(recorder.operations & {"_spin", "aten.mm.default"})]


@pytest.mark.verify
def test_a_matmul_is_timed_next_to_a_kernel_that_compiles(library: Path) -> None:
    times, *operations = run_apart(library, __name__, "curve", None)
    assert [ctas for ctas, _ in times] == [0, 4, 8, 16, 22, 32, 64]
    assert operations == ["_spin", "aten.mm.default"]


@pytest.mark.verify
@pytest.mark.parametrize("cases", [STRATEGIES, KINDS, COMPILED], ids=["letters", "kinds", "graphs"])
def test_it_does_so_in_every_kind_of_run(library: Path, cases: dict[str, Case]) -> None:
    check(library, list(cases))


def test_a_gpu_waits_only_at_the_end_of_a_step_and_mistakes_are_told(library: Path) -> None:
    """In one test: the library and the process take long to make."""
    nothing, found = run_apart(library, __name__, "problems_without_and_with_mistakes", FEW)
    assert not nothing, listed(nothing)
    for mistake, text in MISTAKES.items():
        line = mistake.__code__.co_firstlineno + 1
        told_there = f"{text}, at tests/paro/test_fake_cuda.py:{line} ("
        lines = [each for each in found if told_there in each]
        assert lines, (mistake.__name__, *found)
        if mistake is not reads_a_number_in_backward:
            assert "from model/llama.py:" in lines[0], mistake.__name__
    assert any(each.partition(" x ")[2].startswith("race: aten.mm.") for each in found), found
