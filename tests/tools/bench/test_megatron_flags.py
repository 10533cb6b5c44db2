"""Megatron-LM's configurations are counted correctly, and the page matches the rules."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT
from tools.bench.megatron_flags import (
    command_line,
    degree_of,
    page,
    read_configurations,
    rule_lines,
    try_configuration,
)

SMALL = """\
  --num-layers: 2
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 64
  --micro-batch-size: 2
  --global-batch-size: 8
  --train-iters: 5
  --lr: 0.1
  --data-path: ${DATA_PATH}/corpus
  --tokenizer-type: GPTSentencePieceTokenizer
  --tokenizer-model: ${DATA_PATH}/tokenizer.model
  --use-mcore-models: true
"""
FOLDER = "tests/functional_tests/test_cases/gpt"
CASES = {
    "gpt3_plain": SMALL,
    "gpt3_cut": f"{SMALL}  --tensor-model-parallel-size: 4\n  --zzz: 1\n  --test-mode: true\n",
    "gpt3_odd": f"{SMALL}  --fp4-format: e2m1\n  --num-query-groups: 3\n",
    "mamba": "  --never-read: 1\n",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git checkout with some configurations."""
    folder = tmp_path_factory.mktemp("checkout")
    for name, arguments in CASES.items():
        path = folder / FOLDER / name / "model_config.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"ENV_VARS:\n  A: 1\nMODEL_ARGS:\n{arguments}TEST_TYPE: regular\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return folder


def test_values_become_words_and_ranks_that_cut_the_model_multiply() -> None:
    arguments = {
        "--bf16": True,
        "--seed": "${REPEAT}",
        "--data-path": "$DATA/corpus",
        "--step-batch-size-schedule": "0:384 200B:768",
        "--hierarchical-context-parallel-sizes": "[2 2]",
    }
    assert list(command_line(arguments)) == [
        *("--bf16", "--seed", "1", "--data-path", "DATA/corpus"),
        *("--step-batch-size-schedule", "0:384 200B:768"),
        *("--hierarchical-context-parallel-sizes", "2", "2"),
    ]
    words = "--tensor-model-parallel-size 2 --lr 1 --pipeline-model-parallel-size 4"
    assert degree_of(f"{words} --context-parallel-size 2".split()) == 8


@pytest.mark.process
def test_each_configuration_is_counted_once(checkout: Path) -> None:
    found = read_configurations(checkout)
    assert sorted(found) == ["gpt3_cut", "gpt3_odd", "gpt3_plain"]
    dry_runs = {name: try_configuration(name, words) for name, words in found.items()}
    assert dry_runs["gpt3_plain"].is_untouched
    cut = dry_runs["gpt3_cut"]
    assert cut.unknown == ("--zzz",)
    assert [*cut.refused.values()] == [["--tensor-model-parallel-size 4"]]
    assert (cut.failure, cut.is_data_parallel, cut.is_untouched) == (None, False, False)
    odd = dry_runs["gpt3_odd"]
    assert odd.failure is not None
    assert "--num-query-groups 3" in odd.failure, "what the refusal did not name stays"
    text = page([*dry_runs.values()], "abc", "2026-01-02")
    assert "| in all | 3 | 2 |" in text
    assert "| pass without the flags that the refusal names | 2 | 1 |" in text
    assert "| gpt3_odd | --num-query-groups 3" in text


def test_the_page_says_what_the_rules_do() -> None:
    text = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    missing = [line for line in rule_lines() if line not in text.splitlines()]
    assert not missing, "write it again: python tools/bench/megatron_flags.py MEGATRON_CHECKOUT ..."
