"""One GPU trains as the CPU does; freed buffers return their memory; comm streams keep order."""

from __future__ import annotations

import pytest
import torch

from paro.distributed.comm_stream import CudaStreams
from paro.layout import make_layout, whole_box
from paro.sharding.buffers import ElasticBuffer, Tally
from tests.helpers.training import TINY, Trained, train

pytestmark = pytest.mark.gpu

FLAGS = f"{TINY} --train-iters 8 --global-batch-size 8"
ON_GPU = FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")


def losses(trained: Trained) -> list[float]:
    return [step.loss for step in trained.steps]


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ("", 1e-4),
        ("--recompute-granularity full", 1e-4),
        ("--bf16", 0.02),
        ("--bf16 --grad-reduce-in-bf16", 0.02),
        ("--fp16 --loss-scale 1024", 0.01),
    ],
)
def test_losses_follow_the_cpu_s(more: str, tolerance: float) -> None:
    on_gpu = train(f"{ON_GPU} {more}")
    assert losses(on_gpu) == pytest.approx(losses(train(FLAGS)), rel=tolerance)


def test_dropped_buffers_give_memory_back() -> None:
    layout = make_layout([whole_box("w", (1024, 1024))], decayed=frozenset("w"), world_size=4)
    buffer = ElasticBuffer(
        layout.numel,
        layout=layout,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        tally=Tally(),
    )
    before = torch.cuda.memory_allocated()
    buffer.alloc()
    buffer.boxes["w"].fill_(3.0)
    assert torch.cuda.memory_allocated() - before == 2 * 1024 * 1024
    assert buffer.values[-1].item() == 3.0
    buffer.free()
    assert torch.cuda.memory_allocated() == before


def test_streams_keep_their_order_and_wait_across() -> None:
    streams = CudaStreams()
    slow = torch.randn(4096, 4096, device="cuda")
    sums = torch.zeros(3, device="cuda")

    def work() -> None:
        for _ in range(20):
            torch.mm(slow, slow, out=torch.empty_like(slow))
        sums[0] = 1.0

    def run_after() -> None:
        sums[1] = sums[0] + 1.0

    first = streams.submit("a", work)
    second = streams.submit("b", run_after, after=first)
    streams.submit("c", lambda: sums[2:].fill_(7.0)).wait()
    second.wait()
    assert sums.tolist() == [1.0, 2.0, 7.0]
    streams.close()
