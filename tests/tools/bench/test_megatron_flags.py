"""Megatron-LM's configurations become words, and the page matches the rules."""

from tests.helpers.ranks import ROOT
from tools.bench.megatron_flags import command_line, degree_of, rule_lines


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


def test_the_page_says_what_the_rules_do() -> None:
    text = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    missing = [line for line in rule_lines() if line not in text.splitlines()]
    assert not missing, "write it again: python tools/bench/megatron_flags.py MEGATRON_CHECKOUT ..."
