"""The recipes: what they configure, that they fit, and that narrow twins of them train."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from model.units import num_parameters
from tests.end_to_end.test_training import run_main
from tests.helpers.launch_scripts import BIN, EXAMPLES, Started, bash, planned, start

pytestmark = pytest.mark.process

FOLDER = EXAMPLES / "recipes"
NARROW = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --seq-length 16 --vocab-size 64 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr-warmup-iters 2 --lr-wsd-decay-iters 4 --eval-iters 1 "
    "--distributed-backend gloo"
)


class Row(NamedTuple):
    """What the page says of a recipe."""

    parameters: str
    tokens: str
    steps: str
    gigabytes: str


def rows() -> dict[str, Row]:
    found = re.findall(r"^\| `(.*\w+\.sh)` \| (.+) \|$", (FOLDER / "README.md").read_text(), re.M)
    return {name: Row(*cells.split(" | ")) for name, cells in found}


ROWS = rows()


def start_recipe(recorders: Path, name: str, *args: object, **environment: object) -> Started:
    """Starts what the page names, with the variables before it."""
    *settings, script = name.split()
    variables = dict(setting.split("=") for setting in settings)
    return start(recorders, FOLDER / script, *args, **variables, **environment)


def in_words(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def test_the_page_has_every_recipe() -> None:
    assert {path.name for path in FOLDER.glob("*.sh")} == {
        "recipe.sh",
        *(name.split()[-1] for name in ROWS),
    }


@pytest.mark.parametrize("name", ROWS)
def test_it_configures_what_the_page_says_and_fits(
    recorders: Path, name: str, tmp_path: Path
) -> None:
    plan = planned(start_recipe(recorders, name, tmp_path / "saved", DRY_RUN=1))
    batches = plan.config.batches
    found = Row(
        parameters=in_words(num_parameters(plan.config.model)),
        tokens=f"{batches.samples_after(1) * plan.config.data.seq_length:,}",
        steps=f"{plan.config.train.train_iters:,}",
        gigabytes=f"{plan.memory.total / 1e9:.1f}",
    )
    assert found == ROWS[name]
    assert plan.memory.total / 1e9 < plan.config.launch.device_memory_gb


def test_it_takes_a_corpus_and_a_tokenizer(recorders: Path, tmp_path: Path) -> None:
    for name, environment in (
        ("llama_125m.sh", {"VOCAB_FILE": "v.json", "MERGE_FILE": "m.txt"}),
        ("tinyllama_1b.sh", {"TOKENIZER_MODEL": "v.json"}),
        ("llama3_8b.sh", {"TOKENIZER_MODEL": "v.json"}),
    ):
        started = start(recorders, FOLDER / name, tmp_path, "corpus", NNODES=2, **environment)
        assert started.launcher[:5] == ["torchrun", "--nproc-per-node", "8", "--nnodes", "2"]
        assert started.flags[started.flags.index("--data-path") + 1] == "corpus"
        assert set(environment.values()) <= set(started.flags)


@pytest.mark.slow("trains")
@pytest.mark.parametrize("name", ROWS)
def test_a_narrow_twin_trains(recorders: Path, name: str, tmp_path: Path) -> None:
    started = start_recipe(recorders, name, tmp_path, "MOCK", *NARROW)
    ended = run_main(["pretrain_llama.py", *started.flags])
    assert ended.mistake is None, ended.mistake
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("iteration", 0) for line in lines) == 10
    (begun,) = json.loads((tmp_path / "metrics.jsonl.run.json").read_text())["starts"]
    assert begun["arguments"]["optimizer"] == ("muon" if "muon" in name else "adam")


@pytest.mark.parametrize("name", sorted({name.split()[-1] for name in ROWS}))
def test_help_starts_nothing(recorders: Path, name: str) -> None:
    assert f"bash examples/recipes/{name} " in bash(FOLDER / name, "--help", path=str(BIN))
