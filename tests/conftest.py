"""Requirements of marked tests, which skip with a reason if unmet, and the order of all tests."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import margins, outcomes
from tests.helpers.warm_python import warm_python

# Set before this process imports torch, and for its children. Ranks share the cores of one machine.
# torch resolves the names of addresses that it connects to, only for logs, and a lost answer blocks
# a rank for 5 s: no name server is asked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RES_OPTIONS"] = "attempts:0"
HAS_GPU = Path("/dev/nvidia0").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

# A shell starts background jobs with SIGINT ignored; the processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


_num_frozen = 0  # modules that are not searched for garbage
SLOWEST = Path(__file__).parents[1] / "examples" / "measured" / "slowest-tests.txt"


@cache
def lacks_gpu() -> str | None:
    """The reason why tests marked `gpu` cannot run here, if any."""
    import torch  # imported here so that pure tests start without it

    return None if torch.cuda.is_available() else "needs a GPU: torch sees no CUDA device"


@cache
def lacks_root() -> str | None:
    """The reason why tests marked `root` cannot run here, if any."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2, util-linux)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        return "needs the right to make network namespaces, which this root lacks"
    return None


@cache
def lacks_browser() -> str | None:
    """The reason why tests marked `browser` cannot run here, if any."""
    return None if any(map(shutil.which, BROWSERS)) else f"needs one of {', '.join(BROWSERS)}"


@cache
def lacks_compiler() -> str | None:
    """The reason why tests marked `compiler` cannot run here, if any."""
    from tests.helpers.fake_cuda import find_compiler

    return None if find_compiler() else "needs a C++ compiler: g++ or clang++"


LACKS: dict[str, Callable[[], str | None]] = {
    "gpu": lacks_gpu,
    "root": lacks_root,
    "browser": lacks_browser,
    "compiler": lacks_compiler,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must-run",
        default="",
        metavar="MARKERS",
        help="comma-separated markers whose tests fail instead of skipping, e.g. root,browser",
    )
    parser.addoption(
        "--most-seconds",
        type=float,
        default=math.inf,
        metavar="N",
        help="fail tests whose own processor time is longer, unless marked slow with a reason",
    )
    parser.addoption(
        "--outcomes", type=Path, metavar="FILE", help="write each test's outcome to a new file"
    )
    parser.addoption(
        "--continue",
        action="store_true",
        help="add to the file of --outcomes, and leave out the tests that have passed there",
    )


def pytest_configure(config: pytest.Config) -> None:
    outcomes.install()
    file = config.getoption("--outcomes")
    if file is not None:  # workers of xdist report to the process that writes
        settings = {"continues": config.getoption("--continue")}
        settings["writes"] = not hasattr(config, "workerinput")
        plugin = outcomes.Outcomes(file, outcomes.present_commit(), **settings)
        config.pluginmanager.register(plugin)
    # Where the plugin is missing, as it may be for `make gpu`, tests have no limit of their own.
    config.addinivalue_line("markers", "timeout(seconds): a limit of pytest-timeout")
    unknown = must_run(config) - LACKS.keys()
    if unknown:
        raise pytest.UsageError(f"--must-run knows {', '.join(LACKS)}, not {', '.join(unknown)}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """How long all tests take, if all are asked for."""
    found = re.search(r"([\d,]+ tests) in (\d+) s", SLOWEST.read_text(encoding="utf-8"))
    is_whole = config.args == config.getini("testpaths") and not config.getoption("markexpr")
    if found is None or not is_whole:
        return []
    return [f"all tests: {found[1]} took {int(found[2]) / 60:.0f} minutes on 2 quiet cores"]


def must_run(config: pytest.Config) -> set[str]:
    """The markers whose tests must not skip in this run."""
    return set(filter(None, config.getoption("--must-run").split(",")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers of pytest-xdist are forked from one process that has torch, and share its server.

    Not where tests use a GPU: CUDA does not start in a fork of a process that has looked for one.
    Nor under coverage, which ends with the forked process.
    """
    if not HAS_GPU and "coverage" not in sys.modules:
        for spec in specs:
            spec.python = str(warm_python(sys.executable) / "python")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()  # there is no garbage among modules and tests
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Studies are left out unless -m names their mark, verify; the other tests are put in order.

    Cheap tests run first, those of files with the slowest before others that start processes.

    So no worker ends alone with one of these. What is slow for one reason runs in a row: a worker
    that imports a library for the first has it for the others.
    """
    if not re.search(r"\bverify\b", config.getoption("markexpr")):
        studies = [item for item in items if item.get_closest_marker("verify")]
        config.hook.pytest_deselected(items=studies)
        items[:] = [item for item in items if not item.get_closest_marker("verify")]
    slowest = re.findall(r"^[\d.]+s +(\S+?)::", SLOWEST.read_text(encoding="utf-8"), re.M)
    turns = {file: turn for turn, file in enumerate(dict.fromkeys(slowest))}

    def turn_of(item: pytest.Item) -> tuple[int, str]:
        if any(map(item.get_closest_marker, outcomes.MAY_START)):
            return turns.get(item.nodeid.partition("::")[0], len(turns)), ""
        slow = item.get_closest_marker("slow")
        return -1, "" if slow is None else slow.args[0]

    items.sort(key=turn_of)


def pytest_collection_finish() -> None:
    freeze_imported()
    gc.set_threshold(700, 10, 100)  # of the oldest objects rarely: most are of imported modules


def freeze_imported() -> None:
    """Searches what thousands of tests and their imports keep alive for garbage once, not again.

    Trainings collect garbage, which among the objects of large libraries takes longer than they do.
    """
    global _num_frozen
    gc.collect()
    gc.freeze()
    _num_frozen = len(sys.modules)


def pytest_runtest_teardown() -> None:
    if len(sys.modules) > _num_frozen + 100:
        freeze_imported()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    for marker, lacks in LACKS.items():
        reason = lacks() if item.get_closest_marker(marker) else None
        if reason and marker in must_run(item.config):
            pytest.fail(f"may not skip: {reason}", pytrace=False)
        if reason:
            pytest.skip(reason)
    with outcomes.held(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        with outcomes.held(item), outcomes.timed(item, item.config.getoption("--most-seconds")):
            return (yield)
    finally:
        closest = margins.take_closest()
        if closest is not None:
            item.user_properties.append(("closest", (closest.ratio, closest.label)))
        if item.get_closest_marker("bits"):
            from tests.helpers.cpus import cpu_kind  # imports torch

            item.user_properties.append(("cpu", cpu_kind()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the comparison of trainings closest to failing, and on which CPUs bits were equal."""
    noted: dict[str, list[Any]] = {"closest": [], "cpu": []}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties if report.when == "call" else ():
                if name in noted:
                    noted[name].append((value, report.nodeid))
    of_margins = sorted(noted["closest"], reverse=True)
    for number, ((ratio, label), test) in enumerate(of_margins):
        if number == 0 or ratio > margins.MOST:
            terminalreporter.line(
                f"{number + 1}. of {len(of_margins)} tests that compare trainings: {ratio:.2f} of "
                f"the allowed difference (without a fault at most {margins.MOST}), {label}, {test}"
            )
    if noted["cpu"]:
        kinds = ", ".join(sorted({kind for kind, _ in noted["cpu"]}))
        terminalreporter.line(f"kernels and quantization, bit by bit: on {kinds}")
