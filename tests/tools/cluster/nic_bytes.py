"""Run in an emulated cluster: trains with strategies and reports the bytes that the NICs sent."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.world import World
from paro.training.step import train_step
from tests.helpers.training import begun, built
from tools.shared.meters import sent_bytes

FLAGS = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 4096 "
    "--make-vocab-size-divisible-by 1 --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--ffn-hidden-size 688 --seq-length 8 --micro-batch-size 1 --num-workers 0 --lr 0.001 "
    "--bf16 --train-iters 10"
)
WAYS = {
    "": "",
    "rotate": "--paro-materialize rotate",
    "in-place": "--paro-materialize rotate --paro-rotate-in-place",
    "4-bit": "--paro-inter-grad-bits 4 --paro-inter-param-bits 4",
    "8-bit": "--paro-inter-grad-bits 8 --paro-inter-param-bits 8",
    "last": "--trainable last-blocks:0.5",
    **{
        f"outer-{bits}": f"--paro-outer-steps 1 --paro-outer-warmup 0 --paro-outer-bits {bits}"
        for bits in (32, 16, 8, 4)
    },
    "lora": "--lora-rank 32 --lora-alpha 32 --lora-target-modules all-linear",
}
STEPS = 2
CALIBRATION_BYTES = 32 << 20


def all_sent(control: Control) -> tuple[int, int]:
    """Bytes that NICs and loopbacks of the cluster have sent, after all transfers have ended."""
    control.barrier()
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    sent = sent_bytes((nic, "lo"))
    control.barrier()
    inside = sent["lo"] if os.environ["LOCAL_RANK"] == "0" else 0
    nics, loopbacks = map(int, control.sum([float(sent[nic]), float(inside)]))
    return nics, loopbacks


def calibrate(control: Control, to: int, way: int) -> float:
    """Bytes on the wire per byte sent, for one transfer from rank 0; by NICs or loopbacks."""
    before = all_sent(control)[way]
    payload = torch.zeros(CALIBRATION_BYTES, dtype=torch.uint8)
    if control.world.rank == 0:
        dist.send(payload, to)
    elif control.world.rank == to:
        dist.recv(payload, 0)
    return (all_sent(control)[way] - before) / CALIBRATION_BYTES


def measure(strategy: str, collective: str, control: Control) -> dict[str, float]:
    """The bytes sent by NICs and loopbacks in some steps, and the bytes counted by the code.

    A suffix of the strategy's name selects rotation, or fewer bits between groups.
    """
    world = control.world
    letters, _, way = strategy.partition("+")
    words = f"{FLAGS} --paro-strategy {letters} --paro-collective {collective} {WAYS[way]} "
    words += f"--global-batch-size {2 * world.size}"
    config, training = built(words, control=control)
    state, source = begun(config, training)
    train_step(training, state, source)
    training.model.wait_for_updated_params()
    before = all_sent(control)
    counted = inside = 0
    for _ in range(STEPS):
        sent = train_step(training, state, source).sent
        counted, inside = counted + sent.inter, inside + sent.intra
    training.model.wait_for_updated_params()
    nics, loopbacks = (now - then for now, then in zip(all_sent(control), before, strict=True))
    training.close()
    counts = control.sum([float(counted), float(inside)])
    return {"nics": nics, "counted": counts[0], "loopbacks": loopbacks, "counted_inside": counts[1]}


def main() -> None:
    file, strategies, collectives = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    control = Control(world, torch.device("cpu"))
    found: dict[str, object] = {
        "calibration": calibrate(control, size - 1, 0),
        "calibration_inside": calibrate(control, 1, 1),
    }
    for strategy in strategies.split("/"):
        for collective in collectives.split(","):
            found[f"{strategy} {collective}"] = measure(strategy, collective, control)
            if rank == 0:
                Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")
    control.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
