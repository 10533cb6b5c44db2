"""A start finds an earlier machine file, or measures, on one rank and on four; all choose alike."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paro.collectives.schedule import Op
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.machine.files import read_machine
from paro.machine.machine import Machine, MeasuredTime
from paro.measuring import benchmark, start
from paro.measuring.device import Effort
from paro.report.memory import peak_memory_bytes
from paro.report.watchdog import WatchConfig, Watchdog
from paro.topology import Axes
from paro.training.exit_signal import ExitSignal
from tests.helpers.refusals import output_of, refused
from tests.helpers.scripts import run_script
from tests.helpers.triton_kernels import H100
from tests.paro.config.test_run import SMALL, configure
from tests.paro.measuring.test_measure import alone
from tests.paro.planning.cases import machine

AUTO = f"{SMALL} --distributed-backend gloo --paro-strategy auto"
ROWS = tuple(
    MeasuredTime(axes=axes, op=op, algorithm="native", bytes=4096, seconds=1e-3)
    for axes in (Axes.INTRA, Axes.INTER)
    for op in Op
)
MACHINE = machine(world_size=4, group_size=2, inter=10, measured=ROWS)


def stem(flags: str) -> str:
    return start.file_stem(start.conditions(configure(f"{AUTO} {flags}"), alone()))


@pytest.mark.parametrize(
    ("flags", "is_same"),
    [
        ("--lr 0.2 --train-iters 20 --global-batch-size 64 --seed 3 --save x", True),
        ("--paro-strategy IIG --paro-inter-bits auto", True),
        ("--recompute-granularity full --trainable last-blocks:0.5", True),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", True),
        ("--micro-batch-size 4", False),
        ("--hidden-size 128", False),
        ("--bf16", False),
        ("--paro-collective auto", False),
        ("--paro-materialize rotate", False),
        ("--distributed-backend nccl", False),
    ],
)
def test_a_file_is_of_what_a_measurement_depends_on(flags: str, is_same: bool) -> None:
    assert (stem(flags) == stem("")) is is_same


@pytest.mark.parametrize("place", ["platform.node", "torch.get_num_threads", "torch.__version__"])
def test_a_file_is_of_these_hosts(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    before = stem("")
    monkeypatch.setattr(place, "2.99" if "version" in place else lambda: "another")
    assert stem("") != before


def test_a_file_is_of_the_kernels_of_this_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(f"{AUTO} --distributed-backend nccl")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _device: "H100")

    def found(cudnn: int) -> str:
        monkeypatch.setattr(start, "gpu_of", lambda _device: H100._replace(cudnn=cudnn))
        return start.file_stem(start.conditions(config, Control(World(), torch.device("cuda"))))

    assert found(91900) == found(91900) != found(91002)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of machines that were measured, all of them simulated."""
    names: list[str] = []

    def measure(*_: object, name: str, say: Callable[[str], None], **__: object) -> Machine:
        names.append(name)
        say("all")
        return MACHINE

    monkeypatch.setattr(start, "measure_machine", measure)
    return names


def watched() -> Watchdog:
    return Watchdog(WatchConfig(hang_dump_minutes=0), rank=0, timeout_minutes=9)


def found(flags: str) -> Machine:
    """Returns the machine of a start, without the conditions in its file."""
    with watched() as watchdog:
        made = start.find_measured(configure(f"{AUTO} {flags}"), alone(), watchdog)
    assert made.conditions
    return replace(made, conditions={})


def test_a_machine_is_measured_once_and_again_when_asked(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--save {tmp_path / 'run'}"
    assert found(flags) == MACHINE
    path = tmp_path / "run" / f"{measured[0]}.json"
    assert f"machine file {path}, which --paro-machine takes" in capsys.readouterr().out
    os.utime(path, (0, time.time() - 3661))
    assert found(flags) == MACHINE
    assert f"machine file {path}, 1:01:0" in capsys.readouterr().out
    assert len(measured) == 1
    found(f"{flags} --paro-machine measure")
    assert len(measured) == 2
    found(f"{flags} --micro-batch-size 4")
    assert len(measured) == 3


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"name": "renamed", "source": "typed"}, None),
        ({"group_size": 4}, "4 ranks in one group"),
        ({"conditions": {}}, "conditions.ranks"),
        ({"conditions": {"tokens": "1 x 8 of 8"}}, "conditions.tokens"),
        ({"measured": []}, "no all_gather over intra axes by native"),
        ({"device": None}, "no device"),
    ],
    ids=str,
)
def test_what_is_in_a_file_decides_whether_it_is_taken_again(
    measured: list[str], tmp_path: Path, changes: dict[str, Any], why: str | None
) -> None:
    flags = f"--save {tmp_path}"
    found(flags)
    (path,) = tmp_path.iterdir()
    fields = json.loads(path.read_text(encoding="utf-8"))
    if changes.get("conditions"):
        changes = {"conditions": fields["conditions"] | changes["conditions"]}
    path.write_text(json.dumps(fields | changes), encoding="utf-8")
    moved = path.rename(tmp_path / "moved.json")
    assert ("moved.json, 0:0" in output_of(lambda: found(flags))) is (why is None)
    moved.rename(path)
    message = output_of(lambda: found(flags))
    assert ("is measured again: " in message) is (why is not None)
    assert (why or "taken again") in message
    assert len(measured) == (1 if why is None else 3)


def test_a_file_that_cannot_be_read_is_measured_again(measured: list[str], tmp_path: Path) -> None:
    flags = f"--save {tmp_path}"
    path = tmp_path / f"{stem('')}.json"
    path.write_text("{", encoding="utf-8")
    (tmp_path / "another.json").write_text("[]", encoding="utf-8")
    message = output_of(lambda: found(flags))
    assert f"{path} is measured again: machine file {path} is not valid JSON" in message
    assert replace(read_machine(path), conditions={}) == MACHINE
    assert len(measured) == 1


def test_without_save_files_are_in_the_user_s_cache_or_nowhere(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, file = tmp_path / "cache", tmp_path / "file"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    found("")
    assert (cache / "llama-paro" / f"{measured[0]}.json").exists()
    file.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert "the next start measures again" in output_of(lambda: found(""))
    assert len(measured) == 2


def test_memory_of_the_measurement_is_no_peak_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peaks: list[int] = []

    def measure(*_: object, **__: object) -> Machine:
        torch.ones(2**26)
        peaks.append(peak_memory_bytes(torch.device("cpu")))
        return MACHINE

    monkeypatch.setattr(start, "measure_machine", measure)
    found(f"--save {tmp_path}")
    assert peak_memory_bytes(torch.device("cpu")) < peaks[0] - 2**26


class Differing(Control):
    """Another rank chooses another strategy."""

    def gather(self, value: object) -> list[Any]:
        other = {**value, "--paro-strategy": "GGG"} if isinstance(value, dict) else value
        return [value, other]


@pytest.mark.usefixtures("measured")
def test_ranks_that_choose_differently_end(tmp_path: Path) -> None:
    config = configure(f"{AUTO} --save {tmp_path}")
    assert config.open is not None
    with watched() as watchdog:
        chosen = start.plan_on_this_machine(config, alone(), watchdog)
        assert chosen.sharding.machine.measured == ROWS
        assert chosen.open is None
        assert any(line.startswith("planner: chose ") for line in chosen.notices)
        differing = Differing(World(), torch.device("cpu"))
        planned = partial(start.plan_on_this_machine, config, differing, watchdog)
        refused(planned, "--paro-strategy must be the same on all ranks ... GGG")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR2"])
def test_a_signal_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]

    def measure(_: object, control: Control, **__: object) -> Machine:
        signal.raise_signal(number)
        signal.raise_signal(number)  # torchrun and a terminal may both send one
        control.gather("a time")
        raise AssertionError("it measured on")

    monkeypatch.setattr(start, "measure_machine", measure)
    flags = f"{AUTO} --save {tmp_path} --exit-signal-handler --exit-signal SIGUSR2"
    config = configure(flags)
    before = {each: signal.getsignal(each) for each in ExitSignal.numbers(config.train)}
    with watched() as watchdog:

        def leave() -> None:
            assert start.plan_on_this_machine(config, alone(), watchdog) is None

        try:
            message = output_of(leave)
            signal.raise_signal(number)  # late ones are ignored too
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    assert f"[exiting program after receiving {name} " in message
    assert not [*tmp_path.iterdir()]


MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --micro-batch-size 1 "
    "--global-batch-size 8"
)
ON_RANKS = f"{MODEL} --lr 0.002 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
ON_RANKS += "--distributed-backend gloo --peak-tflops 1 --paro-group-size 2"
STRATEGY = ("--paro-strategy", "auto")


def briefly() -> None:
    """Times each thing once; nothing computes beside links, which tests of benchmarks do."""
    start._EFFORT = Effort(warmup=1, steps=1, micro_batches=1, seconds=0.1)  # type: ignore[misc]
    start._LINKS = start._LEAST_FOR_LINKS = 0.5  # type: ignore[misc]
    benchmark.computing = lambda _: nullcontext()  # type: ignore[assignment]


def trained(*flags: object, iterations: int = 2) -> str:
    words = (*flags, "--train-iters", iterations)
    done = run_script(["pretrain_llama.py", *ON_RANKS.split(), *words], 4, before=briefly)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_ranks_measure_once_and_then_train_as_ever(tmp_path: Path) -> None:
    save = tmp_path / "run"
    saving = ("--save", save, "--load", save, "--override-opt_param-scheduler")
    message = trained(*STRATEGY, *saving)
    (path,) = save.glob("machine-*.json")
    assert "> measuring this machine, about 60 s: links, inter\n" in message
    assert f"machine file {path}, which --paro-machine takes\n" in message
    (chosen,) = re.findall(r"^> strategy: (\S+), 4 ranks in groups of 2", message, re.M)
    assert f"planner: chose {chosen}, " in message
    made = read_machine(path)
    assert (made.name, made.world_size, made.group_size) == (path.stem, 4, 2)
    assert {row.axes for row in made.measured} == {Axes.INTRA, Axes.INTER}
    assert {row.algorithm for row in made.measured} == {"native"}
    assert made.device is not None

    # Continued it keeps its strategy and measures nothing.
    message = trained(*STRATEGY, *saving, iterations=3)
    assert (
        f"the run continues with --paro-strategy {chosen}, as its checkpoint in {save}" in message
    )
    assert "> strategy: " + chosen in message
    assert "measuring" not in message


def one_is_signalled() -> None:
    """Rank 3 gets SIGTERM where it would time links."""
    briefly()
    curve = benchmark._curve

    def until_then(*given: Any) -> Any:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return curve(*given)

    benchmark._curve = until_then  # type: ignore[assignment]


@pytest.mark.ranks
def test_all_ranks_leave_when_one_gets_a_signal_while_measuring(tmp_path: Path) -> None:
    words = (*STRATEGY, "--save", tmp_path / "run", "--train-iters", 2, "--exit-signal-handler")
    script = ["pretrain_llama.py", *ON_RANKS.split(), *words]
    done = run_script(script, 4, before=one_is_signalled)
    assert done.returncode == 0, done.stderr
    assert "[exiting program after receiving SIGTERM " in done.stdout
    assert not [*(tmp_path / "run").glob("machine-*.json")]
