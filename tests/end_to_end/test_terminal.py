"""A run in a terminal and under a launcher of one machine; dashboards, and trackers that fail."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from paro.checkpoint.directory import TRACKER
from tests.end_to_end.test_training import MODEL, RUN, SCRIPT, Ended, launch, read_metrics, run_main
from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.refusals import refused, says
from tests.helpers.scripts import Script, children, wait_for
from tests.helpers.warm_process import HANGS_AFTER
from tests.helpers.warm_python import warm_python
from tests.test_public_names import GOLDEN
from tools import torchrun

COMMAND = ["python", SCRIPT, *MODEL, "--mock-data"]
TORCHRUN = ["python", "-m", "torch.distributed.run", "--standalone"]
ONE_MACHINE = ["bash", "examples/one_machine.sh"]


def on_a_terminal(
    *words: str, interrupted: bool = False, output: IO[bytes] | None = None
) -> tuple[str, int]:
    """What a command writes to its own terminal, and its status; optionally with a Ctrl-C.

    Standard output may be elsewhere: then it is what standard error gets.
    """
    here, there = pty.openpty()
    environment = {
        **os.environ,
        "PATH": f"{warm_python()}:{os.environ['PATH']}",
        **{"TERM": "xterm", "COLUMNS": "120", "LINES": "40", "WANDB_MODE": "offline"},
    }
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=output or there, stderr=there
    ) as process:
        os.close(there)
        written = b""
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # the last process that could write has exited
                break
            if not part:
                break
            written += part
            if interrupted and re.search(rb"iteration \d+/", written):
                process.send_signal(signal.SIGINT)
                interrupted = False
    os.close(here)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return text.replace("\r\n", "\n"), process.returncode


@pytest.mark.ranks
def test_a_terminal_shows_the_view_and_the_lines_go_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    short = [*COMMAND, "--train-iters", "4", "--eval-iters", "1", "--terminal"]
    lines, status = on_a_terminal(*short, "lines")
    assert status == 0, lines
    assert lines.count("elapsed time per iteration") == 4
    assert "iteration 4/4" not in lines
    with (tmp_path / "log").open("wb") as log:
        view, status = on_a_terminal(*short, "live", output=log)
    lines = (tmp_path / "log").read_text()
    assert status == 0, view
    for shown in ("│ iteration 4/4", "MFU", "tokens/s", "parameters"):
        assert shown in view
    assert re.search(r"│ validation +\d", view)
    assert "lm loss" not in view
    assert lines.count("elapsed time per iteration") == 4
    assert lines.count("validation loss at") == 2  # on the validation and the test set
    assert not {"│", "\x1b"} & set(lines)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "status", "after"),
    [pytest.param(TORCHRUN, 1, "Traceback", marks=pytest.mark.verify), (ONE_MACHINE, 0, "")],
    ids=["torchrun", "one_machine.sh"],
)
def test_a_run_saves_at_ctrl_c_and_says_how_to_continue(
    tmp_path: Path, launcher: list[str], status: int, after: str
) -> None:
    save = ["--train-iters", "1000000", "--save", str(tmp_path), "--load", str(tmp_path)]
    board = ["--wandb-project", "p", "--wandb-save-dir", str(tmp_path)]
    command = [*launcher, "--nproc-per-node", "2", *COMMAND[1:], *save, *board]
    text, ended_with = on_a_terminal(*command, "--exit-signal-handler", interrupted=True)
    assert ended_with == status, text
    saved = int((tmp_path / TRACKER).read_text())
    assert "[exiting program after receiving SIGINT.]" in text
    # The view closes complete; our last line is below it, before a traceback of torchrun's own.
    ended = text.rindex("╯\n")
    line = f"iteration {saved} is saved in {tmp_path}: the same command continues from there\n"
    below = text[ended + 2 :]
    assert below.startswith(f"{line}{after}") if after else below == line
    assert f"│ iteration {saved}/1000000" in text[text.rindex("╭─") : ended]
    assert "elapsed time per iteration" not in text
    assert "memory (MB)" in text  # other lines scroll above
    assert text.count("Traceback") == (1 if after else 0)


LAUNCHER = ROOT / "examples" / "one_machine.sh"
# Prints the addresses on which the agent and rank 0 listen once the ranks have communicated.
LISTENING = """
import os, psutil
from paro.distributed.process_group import RuntimeConfig, distributed
from paro.distributed.world import read_world
world = read_world()
with distributed(RuntimeConfig(distributed_backend="gloo"), world) as control:
    assert control.gather(world.rank) == [0, 1]
    for name, pid in (("rank", os.getpid()), ("agent", os.getppid())) if world.rank == 0 else ():
        sockets = psutil.Process(pid).net_connections()
        found = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        print(name, *found, flush=True)
    control.barrier()
os._exit(0)  # as entry scripts do: gloo's threads may abort an interpreter that shuts down
"""


# What every rank of a job runs, where the one of rank 1 differs.
SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), print("saved\\n", end=""), sys.exit()))
signal.signal(signal.SIGINT, lambda *_: sys.exit(0 if os.environ["RANK"] == "0" else 3))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("started\\n", end="", flush=True)
while True:
    time.sleep(0.05)  # a signal just before a long one would wait for its end
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(1000)
from paro.distributed.user_errors import run_script
from paro.errors import UserError
def main():
    {}
run_script("job.py", main)
"""


def start_job(script: Path, text: str) -> subprocess.Popen[str]:
    script.write_text(text)
    return subprocess.Popen(
        # These tests may run under nohup, whose children ignore SIGHUP.
        ["env", "--default-signal=HUP", "bash", LAUNCHER, "--nproc-per-node", "2", script],
        env=os.environ | {"PATH": f"{warm_python()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_on_one_machine_nothing_listens_on_another_interface(tmp_path: Path) -> None:
    with start_job(tmp_path / "listening.py", LISTENING) as job:
        out, said = job.communicate()
    assert job.returncode == 0, said
    rank, agent = sorted(out.splitlines(), reverse=True)
    assert (rank, agent) == ("rank 127.0.0.1", "agent")


ENDS = {  # what rank 1 does, and how the job then ends
    "raise UserError('a mistake', on_this_rank=True)": (2, "job.py: error: a mistake\n"),
    "os.kill(os.getpid(), 9)": (137, "torchrun.py: rank 1 was killed by SIGKILL\n"),
    "raise KeyError('a bug')": (1, "KeyError: 'a bug'\ntorchrun.py: rank 1 ended with status 1\n"),
}


@pytest.mark.ranks
def test_a_job_ends_with_the_status_and_the_line_of_the_rank_that_failed(tmp_path: Path) -> None:
    """A bug keeps its traceback, and the launcher has none."""
    for what in ENDS:
        with start_job(tmp_path / "job.py", FAILS.format(what)) as job:
            _, message = job.communicate()
        assert job.returncode == ENDS[what][0]
        assert message.endswith(ENDS[what][1])
        is_bug = "KeyError" in what
        assert message.count("Traceback") == is_bug
        assert is_bug or message == ENDS[what][1]


@pytest.mark.ranks
def test_a_signal_reaches_the_ranks_which_have_time_to_end(tmp_path: Path) -> None:
    for signals, status, printed, said in (
        ([signal.SIGTERM, signal.SIGTERM], 0, "saved\nsaved\n", ""),  # a supervisor and a shell
        ([signal.SIGINT], 3, "", ""),
        ([signal.SIGHUP, None, signal.SIGTERM], 129, "", "torchrun.py: ended by SIGHUP\n"),
    ):
        with start_job(tmp_path / "job.py", SAVES) as job:
            assert [job.stdout.readline() for _ in range(2)] == ["started\n"] * 2
            for number in signals:
                if number is None:
                    time.sleep(2 * torchrun.IMPATIENT_SECONDS)
                else:
                    job.send_signal(number)
            out, message = job.communicate()
        assert (job.returncode, out, message) == (status, printed, said)


def test_the_status_of_a_signal_stays_where_its_exception_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loses_it(_options: object) -> None:
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)  # nohup ignores SIGHUP
            time.sleep(1000)
        raise ChildFailedError("job", {0: ProcessFailure(0, 1, -9, "none")})

    monkeypatch.setattr("torch.distributed.run.run", loses_it)
    monkeypatch.setattr(torchrun, "end_with_ranks", lambda number: 128 + number)
    before = {name: signal.getsignal(getattr(signal, name)) for name in torchrun.SIGNALS}
    try:
        assert torchrun.main(["job.py"]) == 143
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


# Tags of a run with evaluation, --log-params-norm, --log-num-zeros-in-grad and timers: the names
# that users rely on but for those of some runs alone, and with every kind of what is measured.
WHOLE = ("whole-parameters", "whole-gradients")
TAGS = {tag for tag in GOLDEN["tags"] if not tag.startswith("outer/")}
TAGS -= {"decoupled-learning-rate", "z-loss", "mem-max", "memory/measured-params-bytes"}
TAGS -= {"memory/peak-reserved-bytes", "steps/skipped"}
TAGS |= {"steps/skipped-iterations", "steps/nan-iterations", "communication/exposed-context-ms"}
TAGS |= {"interval-time-time", "forward-backward-time", "optimizer-time"}
TAGS |= {"lm loss validation", "lm loss validation ppl"}
for kind in ("parameters", "gradients", "optimizer", *WHOLE):
    TAGS.add(f"memory/measured-{kind}-bytes")
for kind in ("model-states", "activations", "transient", *WHOLE):
    TAGS.add(f"memory/predicted-{kind}-bytes")


def read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Values by step of every tag."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def service_of(process: int) -> int:
    """wandb's own process."""
    found = [process]
    for child in found:
        if Path(f"/proc/{child}/comm").read_text().strip().startswith("wandb-core"):
            return child
        found += children(child)
    raise AssertionError("wandb has no process of its own")


@pytest.mark.slow("trains several times")
def test_a_run_that_goes_wrong_shows_it(tmp_path: Path) -> None:
    words = f"--mock-data --tensorboard-dir {tmp_path} --train-iters 9 --lr 1e30"
    check = "--check-for-nan-in-loss-and-grad"
    message = refused(lambda: launch(words, check), "has a loss or gradient", status=1)
    stopped = int(message.partition("iteration ")[2].split()[0])
    assert set(read_tensorboard(tmp_path)["iteration-time"]) == set(range(1, stopped + 1))


@pytest.mark.verify
@pytest.mark.ranks
def test_killed_and_unwritable_trackers_cost_one_line_each(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    command = [*RUN, "--tensorboard-dir", tmp_path / "board", "--wandb-project", "p"]
    command += ["--wandb-save-dir", tmp_path, "--metrics-file", tmp_path / "metrics.jsonl"]
    command += ["--train-iters", 100000, "--tensorboard-queue-size", 1, "--exit-signal-handler"]
    script = Script(command, folder=tmp_path, env={"WANDB_MODE": "offline"})

    def printed(pattern: str) -> list[str]:
        return re.findall(pattern, script.output()[0], re.M)

    try:
        wait_for(lambda: printed(r" iteration +3/"))
        os.kill(service_of(script.pid), signal.SIGKILL)
        (tmp_path / "board").rename(tmp_path / "gone")
        (tmp_path / "board").write_text("no folder any more")
        wait_for(lambda: len(printed("is left out from here on")) == 2)
        last = len(printed(r" iteration +\d+/"))
        wait_for(lambda: len(printed(r" iteration +\d+/")) > last)
        os.kill(script.pid, signal.SIGTERM)
        assert script.wait(HANGS_AFTER) == 0, script.output()[1]
    finally:
        script.end()
    lost = printed(r"^(.*) is left out from here on")
    assert sorted(lost) == ["TensorBoard", "Weights & Biases"]
    iterations = [line["iteration"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert iterations == list(range(1, len(iterations) + 1))
    assert len(iterations) >= last


def test_what_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    train, place = "--mock-data --train-iters 2", tmp_path / "file" / "below"
    for flag in ("--tensorboard-dir", "--wandb-save-dir"):
        words, message = f"{flag} {place}", f"{flag} {place} ... {tmp_path}/file is a file"
        refused(lambda words=words: launch(train, words), message)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for flags, package in (
        ("--tensorboard-dir x", "tensorboard"),
        ("--wandb-project x", "wandb"),
        ("--terminal live", "rich"),
    ):
        message = f"{flags.removesuffix(' x')} ... pip install {package}"
        refused(lambda flags=flags: launch(train, flags), message)


@pytest.mark.ranks
def test_all_ranks_stop_where_the_one_that_writes_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [*map(str, RUN), "--train-iters", "3", "--wandb-project", "p"]
    ended: list[Ended] = run_ranks(run_main, 2, words, init=False)
    for rank in ended:
        message = "--wandb-project p: there is no API key ... rank 1 ... wandb login"
        says(rank.mistake or "", message, "WANDB_MODE=offline")
        assert rank.printed == ""
