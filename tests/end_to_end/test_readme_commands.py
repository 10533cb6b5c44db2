"""Every command that the pages print is run as printed, here or by a command of CI.

The commands of a section run in one shell, in a scratch copy of the repository, with small
stand-ins for the reader's files. A command that is in none of the lists below fails a test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pytest
from pyarrow import parquet

from data.tokenizer_json import write_tokenizer_json
from paro.arguments.needed import EXAMPLE
from tests.end_to_end.conftest import executables
from tests.end_to_end.test_readme import PAGES, TEXT
from tests.helpers.ranks import ROOT
from tests.helpers.warm_process import HANGS_AFTER
from tests.helpers.warm_python import warm_python
from tests.paro.checkpoint.convert.folders import save_folder
from tests.tools.conftest import SIZES, save_untrained
from tests.tools.test_report import write_run
from tools.train_tokenizer import main as train_tokenizer

# Sections whose commands `make test` runs; sections of one tuple build on each other.
QUICK = (
    ("Train on your own text", "Damaged files"),
    ("Continue from a Hugging Face model", "Convert between formats"),
    ("Launch on a cluster", "Survive the loss of a node"),
    ("Compare runs",),
    ("Outer steps: groups that train alone and meet every H steps",),
    ("Try it",),
    ("Launch",),
    ("Design",),
)
# Sections whose commands search for plans: `make verify` runs them too.
PLANS = (
    ("Plan a run", "How a step is simulated", "Is it worth it?"),
    (
        "Long sequences: context parallelism",
        "The longest sequence",
        "Compared with published figures",
    ),
)
# Sections whose commands take minutes: `make verify` runs them.
LONG = (
    "The quickstart, command by command",
    "Emulate a cluster on one machine",
    "An adapter on your own text",
    "An adapter on your own conversations",
    "Let a run choose its strategy",
)
# Sections of studies that take a cluster for an hour; tests/tools/bench has tests of the programs.
STUDIES = (
    "Measured on the emulated cluster",
    "Compared with AdamW",
    "Compared with synchronous training",
    "A store that is far away",
)
# How commands of other sections begin: CI runs the first four, `make verify` the next two.
RUN_ELSEWHERE = (
    *("make test", "make setup", "make lint", ".venv/bin/python -m pytest -n 2 tests/paro/optim"),
    *("make quickstart", "make check"),
)

# The first needs a checkout of another project, fixed_runs.py takes minutes, and torchrun is a
# stand-in here: tests/tools has tests of all three, of lm-eval, which is no requirement, and of
# the merge of checkpoints, which needs three of them.
# Two need GPUs; tests/tools/bench/test_benchmarks.py rehearses them. The last four run all tests
# with another torch, in minutes and gigabytes.
BY_HAND = (
    "python tools/bench/megatron_flags.py MEGATRON_CHECKOUT",
    "python tools/bench/fixed_runs.py",
    "torchrun --standalone --nproc-per-node 4 tools/bench_collectives.py",
    "pip install lm-eval",
    "python tools/evaluate.py",
    "python tools/merge_checkpoints.py",
    "python tools/bench/one_rank.py --ranks 128",
    "make gpu",
    "python3 -m venv .venv",
    "grep -vE",
    ".venv/bin/pip install -r requirements-dev.txt torch==",
    ".venv/bin/python -m pytest -n 3",
)

PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:\S*python\d?|torchrun|make|bash|sbatch|srun|sudo|pytest|pip) "

# Replaces a launcher of GPU ranks: runs the same command as a dry run.
LAUNCHER = """while [ "$1" != pretrain_llama.py ]; do shift; done
exec python "$@" --dry-run --world-size 32"""
SBATCH = """[ "$1" = --nodes ] || exit 9
export SLURM_JOB_NUM_NODES=$2 SLURM_NTASKS_PER_NODE=8 SLURM_JOB_NODELIST=n SLURM_SUBMIT_DIR=$PWD
shift 2
exec bash "$@"
"""

# Replaces it where training is real, for a small model on the CPU.
TRAINER = """while [ "$1" != pretrain_llama.py ]; do shift; done
exec python "$@" --distributed-backend gloo --seq-length 16 --micro-batch-size 1 \\
    --global-batch-size 2 --train-iters 3 --lora-rank 4 --eval-iters 0
"""


def python() -> str:
    """Stands for python, and starts what is on the PATH instead of our own torchrun."""
    return f"""case $1 in
    */torchrun.py) exec torchrun "$@" ;;
    *) exec {warm_python()}/python "$@" ;;
esac"""


class Command(NamedTuple):
    """A command as printed, with continued lines, without trailing comments."""

    page: str
    section: str
    text: str


def blocks(text: str) -> list[tuple[str, str, str]]:
    """The section, language and contents of every fenced block."""
    found = []
    section = ""
    for part in re.finditer(r"^#{1,2} ([^\n]*)$|^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if part[1]:
            section = part[1]
        else:
            found.append((section, part[2], part[3]))
    return found


def commands(page: str, text: str) -> list[Command]:
    return [
        Command(page, section, re.sub(r" +#.*", "", line).strip())
        for section, language, content in blocks(text)
        if language == "bash"
        for line in re.split(r"(?<!\\)\n", content)
        if line.strip()
    ]


COMMANDS = [command for path, text in PAGES.items() for command in commands(path.name, text)]


def of(*sections: str) -> str:
    lines = [command.text for command in COMMANDS if command.section in sections]
    assert lines, f"no commands under {sections}"
    return "\n".join(lines)


def type_in(folder: Path, lines: str, *, seconds: float = HANGS_AFTER, **environment: str) -> str:
    """The output of one shell that runs these lines and stops at the first failure."""
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", lines],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


# Completeness


def test_every_command_is_run_by_somebody() -> None:
    sections = {section for group in (*QUICK, *PLANS) for section in group} | {*LONG, *STUDIES}
    left = [command for command in COMMANDS if command.section not in sections]
    known = {*RUN_ELSEWHERE, *BY_HAND}
    others = [
        f"{command.page}, section {command.section!r}: {command.text}"
        for command in left
        if not command.text.startswith((*known,))
    ]
    assert not others, f"run by nobody, see {Path(__file__).name}:\n" + "\n".join(others)
    assert sections <= {command.section for command in COMMANDS}
    assert all(any(each.text.startswith(begin) for each in left) for begin in known)


@pytest.mark.process
def test_the_plain_commands_are_those_of_quickstart() -> None:
    printed = type_in(ROOT, "bash examples/quickstart.sh", DRY_RUN="1", RANKS="2").splitlines()
    of_script = [line.removeprefix("+ ") for line in printed if line.startswith("+ ")][1:]
    assert len(of_script) == 6
    lines = of("The quickstart, command by command").replace("\\\n", " ").splitlines()
    of_readme = [line for line in lines if not line.startswith(("make", "source", "export"))]
    assert [*map(shlex.split, of_readme)] == [*map(shlex.split, of_script)]


def test_the_readme_has_the_example_of_the_help() -> None:
    assert of("Try it") == f".venv/bin/{EXAMPLE}"


def test_what_looks_like_a_command_is_fenced_as_one() -> None:
    for section, language, content in blocks(TEXT):
        if language != "bash":
            found = re.search(rf"^(?:\$ )?{PROGRAMS}.*", content, re.M)
            assert found is None or section == "Files", f"{section}: {found} is not in ```bash"


@pytest.mark.process
def test_what_ci_runs_tries_style_and_types_too() -> None:
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.M)
    made = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True)
    assert all(f"-m {tool}" in made.stdout for tool in ("ruff check", "mypy", "pytest"))


# Commands that take seconds


def checkout(parent: Path) -> Path:
    """A copy of the repository with an environment in it."""
    folder = parent / "llama-paro"
    folder.mkdir()
    ours = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in ours.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "lib64", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    for stamp in ("installed", "installed-for-training"):  # make finds nothing to install
        (folder / ".venv" / stamp).touch()
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return checkout(tmp_path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with small versions of the reader's files, and launchers that start nothing."""
    scratch = checkout(tmp_path_factory.mktemp("readme"))
    text = "some words to make pieces of, naïve ones and 雪 too\n"
    (scratch / "text.txt").write_text(text * 40, encoding="utf-8")
    pieces = scratch / "pieces"
    flags = ["--input", str(scratch / "text.txt"), "--output-prefix", str(pieces)]
    train_tokenizer([*flags, "--vocab-size", "300"])
    shutil.copy(f"{pieces}.model", scratch / "TOKENIZER_MODEL")
    assert write_tokenizer_json(Path(f"{pieces}.model"), scratch)

    (scratch / "crawl").mkdir()
    lines = f'{{"text": "{text.strip()}"}}\n' * 50
    packed = pyarrow.compress(lines.encode(), codec="zstd", asbytes=True)
    (scratch / "crawl" / "part-0.jsonl.zst").write_bytes(packed)
    parquet.write_table(pyarrow.table({"text": [text] * 50}), scratch / "books.parquet")

    save_folder(scratch / "Llama-2-7b-hf", 1, vocab_size=300)
    assert write_tokenizer_json(Path(f"{pieces}.model"), scratch / "Llama-2-7b-hf")
    save_untrained(
        scratch / "runs" / "quickstart" / "checkpoints",
        f"{SIZES} --tokenizer-type SentencePieceTokenizer --tokenizer-model {pieces}.model",
    )
    for letters in ("iig", "nig", "ggg"):
        write_run(scratch / "runs" / f"{letters}.jsonl", letters.upper())
    launchers = {"torchrun": LAUNCHER, "srun": LAUNCHER, "sbatch": SBATCH}
    executables(scratch / "bin", python=python(), scontrol="echo node0", **launchers)
    return scratch


@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [*QUICK, *(pytest.param(plans, marks=pytest.mark.verify) for plans in PLANS)],
    ids=" and ".join,
)
def test_commands_do_what_they_say(prepared: Path, sections: tuple[str, ...]) -> None:
    lines = of(*sections).replace(".venv/bin/python", "python")  # which has torch imported
    out = type_in(prepared, lines)
    started = len(re.findall(r"^(?:[A-Z_]+=\S+ )*(?:torchrun|sbatch|bash examples)", lines, re.M))
    planned = started + lines.count("--dry-run")
    assert out.count("> the launch is sound; nothing was started and nothing written\n") == planned


# Commands that take minutes


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.timeout(3600)
def test_the_quickstart_as_printed(scratch: Path) -> None:
    made = type_in(scratch, "make quickstart", seconds=3000)
    assert re.search(r"^expected .* on held-out text, by 5 seeds: .* is inside$", made, re.M)
    out = type_in(scratch, of("The quickstart, command by command"), seconds=3000)
    assert "successfully loaded checkpoint" in out


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("section", "model", "saved", "exported"),
    [
        ("An adapter on your own text", "Llama-2-7b-hf", "adapter", "peft"),
        ("An adapter on your own conversations", "Llama-2-7b-chat-hf", "talks", "talks-peft"),
    ],
)
def test_an_adapter_as_printed(
    prepared: Path, section: str, model: str, saved: str, exported: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    if not (prepared / model).exists():
        shutil.copytree(prepared / "Llama-2-7b-hf", prepared / model)
    (prepared / model / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "law"}]
    (prepared / "talks.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 30)

    trains = executables(prepared / "trains", python=python(), torchrun=TRAINER)
    path = f"{trains}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    out = type_in(prepared, of(section), PATH=path)
    assert re.search(r"successfully saved checkpoint from iteration +3 to runs/" + saved, out)
    assert "checkpoints hold what trains; the rest is in " in out
    base = AutoModelForCausalLM.from_pretrained(prepared / model)
    tokenizer = AutoTokenizer.from_pretrained(prepared / "runs" / exported)
    assert tokenizer.chat_template == template
    adapted = PeftModel.from_pretrained(base, prepared / "runs" / exported)
    assert adapted.peft_config["default"].r == 4


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(3600)
def test_the_emulated_cluster_as_printed(scratch: Path) -> None:
    out = type_in(scratch, of("Emulate a cluster on one machine"), seconds=3500)
    assert re.search(r"iteration +5/ +5 \|", out)
    for name in ("machine.json", "collectives.png", "peers.png"):
        assert (scratch / name).stat().st_size > 0


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_the_everyday_tests_as_printed(scratch: Path) -> None:
    out = type_in(scratch, "git init --quiet && git add . && make check", seconds=3500)
    assert re.search(r"\d+ passed", out)
