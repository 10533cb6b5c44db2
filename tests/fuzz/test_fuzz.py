"""Damaged inputs end cleanly: a sample with a fixed seed, and thousands under `make verify`."""

from __future__ import annotations

import os
from collections import Counter
from datetime import date
from pathlib import Path
from random import Random

import pytest

from paro.arguments.parser import build_parser
from tests.fuzz.cases import (
    OTHER_FLAGS,
    TARGETS,
    cases,
    damaged_flags,
    fault_of,
    make_inputs,
    run_case,
)
from tests.helpers.house import PRODUCT, ROOT, imports_of, is_within, sources
from tests.helpers.scripts import run_script

# Where files are damaged, a target's name or a test in one process, and the modules that read them.
READERS = {
    "tests/data/test_loss_mask.py": "data.loss_mask",
    "blend": "data.blend",
    "checked corpus": "data.block_checksums",
    "fingerprint": "data.fingerprint",
    "tests/data/test_gpt_dataset.py": "data.gpt_dataset data.index_cache",
    "tokenizer": "data.hugging_face_tokenizer",
    "corpus": "data.indexed_dataset",
    "sentencepiece": "data.tokenizer",
    "tests/data/test_hugging_face_tokenizer.py": "data.tokenizer_json",
    "hugging face": "model.hugging_face paro.checkpoint.convert.hugging_face",
    "yaml": "paro.arguments.yaml_flags",
    "tests/paro/training/test_base.py": "paro.checkpoint.base",
    "megatron": (
        "paro.checkpoint.convert.megatron paro.checkpoint.convert.megatron_names "
        "paro.checkpoint.convert.tensor_files"
    ),
    "torch_dist": "paro.checkpoint.convert.megatron_dist",
    "meta": "paro.checkpoint.convert.meta",
    "native": "paro.checkpoint.convert.native",
    "tests/paro/checkpoint/convert/test_peft.py": "paro.checkpoint.convert.peft",
    "torchtitan": "paro.checkpoint.convert.dcp_files",
    "tracker": "paro.checkpoint.directory",
    "tests/paro/checkpoint/in_memory/test_snapshot.py": "paro.checkpoint.in_memory.snapshot",
    "tests/paro/checkpoint/in_memory/test_recovery.py": "paro.checkpoint.in_memory.recovery",
    "records": (
        "paro.checkpoint.manifest paro.config.parts paro.config.resolve "
        "paro.training.changed_flags paro.training.groups_alone paro.training.resume"
    ),
    "checkpoint": "paro.checkpoint.metadata paro.checkpoint.storage",
    "lease": "paro.checkpoint.folder_lock",
    "machine": "paro.machine.files paro.machine.machine",
    "tests/paro/report/test_dashboards.py": "paro.report.dashboards",
    "metrics": "paro.report.run_files",
    "tests/tools/bench/test_benchmarks.py": "tools.bench.gpu_check.page",
    "tests/tools/bench/test_studies.py": "tools.bench.shared.trainings tools.bench.study_averages",
    "tests/tools/test_emulated_cluster.py": "tools.cluster.state",
    "trace": "tools.draw_profile",
    "tests/tools/test_draw_profile.py": "tools.profiles.device",
    "generation": "tools.generate",
    "partitions": "tools.preprocessing.partitions",
    "report": "tools.run_report.runs",
}
# Programs whose flags are not damaged: they measure for minutes, make namespaces of the kernel,
# have torch's flags, or need a package that tests do not install.
OTHER_PROGRAMS = {
    *("bench_checkpoint.py", "bench_collectives.py", "emulated_cluster.py", "torchrun.py"),
    "evaluate.py",
}
# A third of the targets in every run, the others under `make verify`.
OFTEN = {*Random(1).sample([*TARGETS], len(TARGETS) // 3)}
SAMPLE = [case for case in cases(len(TARGETS), seed=1) if case[0] in OFTEN]


@pytest.mark.process
@pytest.mark.parametrize(
    "name", [pytest.param(t, marks=() if t in OFTEN else pytest.mark.verify) for t in TARGETS]
)
def test_inputs_that_are_whole_are_read(name: str, tmp_path: Path) -> None:
    place, out = make_inputs(tmp_path)
    done = run_script(
        TARGETS[name].command.format(set=place, out=out).split(), before=TARGETS[name].before
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("name", "seed"), SAMPLE)
def test_a_damaged_input_ends_cleanly(name: str, seed: int, tmp_path: Path) -> None:
    fault, how = run_case(name, seed, tmp_path)
    assert fault is None, how


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_two_thousand_damaged_inputs_end_cleanly(tmp_path: Path) -> None:
    """With a seed of the day, or FUZZ_SEED and FUZZ_CASES."""
    seed = int(os.environ.get("FUZZ_SEED", date.today().toordinal()))
    count = int(os.environ.get("FUZZ_CASES", 2000))
    faults: Counter[str] = Counter()
    for number, case in enumerate(cases(count, seed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault, how = run_case(*case, folder)
        if fault is not None:
            faults[fault] += 1
            print(f"{case}: {how}")
    assert not faults, f"seed {seed}: {faults}"


@pytest.mark.slow("parses every file")
def test_every_reader_of_files_has_its_place() -> None:
    ours = ("paro.files",)
    readers = tuple(f"paro.files.{name}" for name in ("checksum", "regular_file", "schema"))
    found = {
        source.module
        for source in sources(*PRODUCT)
        if not is_within(source.module, ours)
        and any(is_within(imported.name, readers) for imported in imports_of(source))
    }
    assert sorted(found) == sorted(" ".join(READERS.values()).split())
    for place in READERS:
        assert place in TARGETS or (ROOT / place).is_file(), place


def test_every_flag_of_every_program_is_damaged() -> None:
    draw = Random(0)
    damaged = [damaged_flags(TARGETS["flags"], draw) for _ in range(20)]
    found = {flag for actions in damaged for action in actions for flag in action.option_strings}
    actions = (*build_parser()._actions, *OTHER_FLAGS)
    wanted = {flag for action in actions for flag in action.option_strings}
    assert wanted - found == {"-h", "--help", "--dry-run"}
    own = {flag for action in min(damaged, key=len) for flag in action.option_strings}
    assert {"--lr", "--save", "--num-layers"} < own < found
    programs = {target.script.name for target in TARGETS.values() if target.takes_odd_flags}
    every = {path.name for path in ROOT.glob("tools/[a-z]*.py")} | {"pretrain_llama.py"}
    assert programs | OTHER_PROGRAMS == every
    assert not programs & OTHER_PROGRAMS


@pytest.mark.parametrize(
    ("status", "stderr", "message"),
    [
        (0, "", None),
        (2, "plan.py: error: m.json: what it is\n", None),
        (2, "plan.py: error: what it is\n", "neither the file nor a flag"),
        (2, "what it is\n", "no line with its name"),
        (2, "plan.py: error: m.json \x1b[2J\n", r"prints '\x1b'"),
        (2, "a notice\nplan.py: error: m.json\n", "stands before"),
        (2, f"plan.py: error: m.json {3000 * 'x'}\n", "2,000 characters"),
        (1, "Traceback (most recent call last):\n", "traceback"),
    ],
)
def test_ends_are_judged(status: int, stderr: str, message: str | None) -> None:
    fault = fault_of("tools/plan.py", status, "", stderr, ["m.json"])
    assert (fault is None) == (message is None)
    assert (message or "") in (fault or "")
