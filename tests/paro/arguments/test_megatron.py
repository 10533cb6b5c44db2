"""Megatron's LLaMA scripts run; refused flags name the setting to use instead."""

import re

import pytest

from paro.arguments.flag_parser import SYNONYMS
from paro.arguments.megatron import (
    BECOMES,
    RULES,
    FlagTreatment,
    changed_parts,
    ignored_lines,
    refusals,
    replacements,
    rule_of,
)
from paro.arguments.parser import build_parser, parse_args
from tests.helpers.refusals import refused, says


def member(flag: str) -> str:
    """The flag, or one of the family that it stands for."""
    return flag.replace("*", "a-new-one")


def test_each_flag_has_one_rule_and_each_rule_says_why() -> None:
    flags = [rule.flag for rule in RULES]
    assert len(set(flags)) == len(flags)
    for rule in RULES:
        is_refused = rule.outcome is FlagTreatment.REFUSED
        assert bool(rule.why) != is_refused, rule.flag
        has_condition = bool(rule.values or rule.where)
        assert bool(rule.instead) == (is_refused or has_condition), rule.flag


def test_a_family_holds_no_flag_with_a_meaning() -> None:
    known = build_parser()._option_string_actions
    synonyms = {f"--{name}" for name in SYNONYMS}
    for rule in RULES:
        if rule.flag.endswith("*"):
            assert rule_of(member(rule.flag)) is rule
            prefix = rule.flag.removesuffix("*")
            assert not [flag for flag in {*known, *synonyms} if flag.startswith(prefix)]
        else:
            assert rule_of(rule.flag) is rule
            assert (rule.flag in known) == (rule.outcome is FlagTreatment.ACCEPTED)


def test_advice_names_flags_that_exist() -> None:
    known = build_parser()._option_string_actions.keys()
    for rule in RULES:
        named = set(re.findall(r"--[a-z0-9-]+", f"{rule.instead} {rule.why}"))
        assert named <= known, rule.flag


def test_what_replaces_a_refused_flag_is_no_refused_flag() -> None:
    assert len(BECOMES) > 10
    for given, text in BECOMES.items():
        flag, _, value = given.partition("=")
        words = replacements(parse_args([flag, value or "7"]))[flag]
        assert words == text.format(value=value or "7").split()
        assert refusals(parse_args(words)) == []


def test_what_is_accepted_changes_nothing_and_says_nothing() -> None:
    rules = [rule for rule in RULES if rule.outcome is FlagTreatment.ACCEPTED]
    first = [[member(rule.flag), *map(str, rule.values[:1])] for rule in rules]
    args = parse_args(["--reset-attention-mask", *(word for words in first for word in words)])
    assert refusals(args) == []
    assert ignored_lines(args) == ()
    for rule in rules:
        for value in rule.values[1:]:
            assert refusals(parse_args([rule.flag, str(value)])) == []


def test_what_is_ignored_says_so() -> None:
    flags = [member(rule.flag) for rule in RULES if rule.outcome is FlagTreatment.IGNORED]
    args = parse_args([word for flag in flags for word in (flag, "7", "x")])
    assert refusals(args) == []
    for flag, line in zip(flags, ignored_lines(args), strict=True):
        assert line.startswith(f"{flag} 7 x has no effect: ")


def test_what_is_refused_says_what_to_do() -> None:
    rules = [rule for rule in RULES if rule.instead]
    words = ["--apply-wd-to-qk-layernorm"]  # under which --apply-layernorm-1p is refused
    for rule in rules:
        words += [member(rule.flag), *(["7"] if rule.values else [])]
    lines = refusals(parse_args(words))
    for rule in rules:
        flag = member(rule.flag)
        (line,) = [line for line in lines if flag in re.split(r"[ ,]", line.split(" not ")[0])]
        value = {int: "7", float: "7.0", str: "7"}[type(rule.values[0])] if rule.values else ""
        assert line.endswith(f" not supported: {rule.instead.format(value=value, degree=49)}")
        assert f"{flag} {value}".rstrip() in line
        assert "{" not in line
    assert len(lines) < len(rules), "one line for those with the same way out"


@pytest.mark.parametrize(
    ("words", "degree"),
    [("TENSOR 2", 2), ("PIPELINE 4 TENSOR 1", 4), ("TENSOR 2 PIPELINE 4", 8), ("TENSOR 0", 1)],
)
def test_a_group_has_as_many_ranks_as_a_model_was_cut_into_parts(words: str, degree: int) -> None:
    for name in ("TENSOR", "PIPELINE"):
        words = words.replace(name, f"--{name.lower()}-model-parallel-size")
    (line,) = refusals(parse_args(words.split()))
    says(line, f"--paro-group-size {degree}")


def test_a_word_behind_a_flag_without_effect_belongs_to_it_alone() -> None:
    args = parse_args(["--test-mode", "--cuda-graph-scope=a", "b", "--seed", "3"])
    assert [line.split(" has ")[0] for line in ignored_lines(args)] == [
        "--test-mode",
        "--cuda-graph-scope a b",
    ]
    for words, message in (("--seed 3 c", "'c' belongs to no flag"), ("-x", "-x is unknown")):
        argv = ["--test-mode", *words.split()]
        refused(lambda argv=argv: parse_args(argv, trains=False), message)


LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)


def test_a_gpt_that_becomes_a_llama_is_told_its_parts() -> None:
    (line,) = changed_parts(parse_args(["--vocab-file", "a", "--merge-file", "b"]))
    says(line, "RMSNorm for LayerNorm ... SwiGLU for GELU ... rotary", "dropout in attention")
    says(line, "--tie-embeddings-and-output-weights")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (LLAMA, []),
        (LLAMA.replace("--untie", "--tie"), []),
        ("--llama-preset llama2-7B", []),
        ("--hidden-size 64 --untie-embeddings-and-output-weights", []),
        (LLAMA.replace("RMSNorm", "LayerNorm"), ["RMSNorm for LayerNorm"]),
        (LLAMA.replace("--swiglu", ""), ["SwiGLU for GELU"]),
        (LLAMA.replace("--hidden-dropout 0", "--hidden-dropout 0.1"), ["no dropout behind it"]),
    ],
)
def test_only_parts_that_change_are_told(words: str, parts: list[str]) -> None:
    lines = changed_parts(parse_args(words.split()))
    assert [line.partition(" LLaMA has ")[2] for line in lines] == parts


def test_sequence_parallelism_is_off_without_tensor_parallelism() -> None:
    for words in ([], ["--tensor-model-parallel-size", "1"]):
        assert refusals(parse_args([*words, "--sequence-parallel"])) == []
    _, line = refusals(parse_args(["--tensor-model-parallel-size", "2", "--sequence-parallel"]))
    assert line.startswith("--sequence-parallel is not supported: ")
    assert "give --recompute-granularity full" in line
