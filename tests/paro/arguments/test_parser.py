"""The parser: Megatron's defaults, mistakes in one line, flags from a file."""

import re
import shlex
import textwrap
import tomllib
from argparse import ArgumentError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from paro.arguments import flag_parser
from paro.arguments.flag_parser import PATHS, SYNONYMS, hint_for
from paro.arguments.needed import EXAMPLE
from paro.arguments.parser import build_parser, check_flags, option_of, parse_args, spelled
from paro.errors import UserError
from tests.helpers.refusals import refused
from tools.planning.request import make_parser


def test_flags_in_help_are_in_one_piece() -> None:
    text = build_parser().format_help()
    assert not re.search(r"--[a-z-]*-\n", text)
    preamble = text[: text.index("\noptions:\n")]
    assert textwrap.indent(EXAMPLE, " " * 21) in preamble
    known = {option for action in build_parser()._actions for option in action.option_strings}
    named = set(re.findall(r"--[a-z][a-z0-9-]+", preamble)) - {"--nproc-per-node"}
    assert len(named) > 15
    assert named <= known
    assert max(map(len, preamble.splitlines())) <= 90


# Mistakes

COMPLETE = shlex.split(EXAMPLE.replace("\\\n", " "))[2:]
NEEDED = [
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--micro-batch-size", "--lr", "--train-iters", "--mock-data"),
]


def lines_for(words: Sequence[str]) -> list[str]:
    """The lines printed to the user for these flags."""
    with pytest.raises(UserError, match="--") as error:
        check_flags(parse_args(words))
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "many"], "argument --num-layers: invalid int value: 'many'"),
        (["--paro-strategi", "IIG"], "--paro-strategi IIG is unknown: did you mean"),
        (["--zzz", "100"], "--zzz 100 is unknown: --help lists all flags"),
        (["--lr", "1e-3", "2e-3"], "'2e-3' belongs to no flag: --help lists all flags"),
        (["--rampup-batch-size", "1", "2"], "expected 3 arguments"),
        (["--yaml-cfg"], "argument --yaml-cfg: expected one argument"),
        (["--bf16=true"], "argument --bf16: ignored explicit argument 'true'"),
        (
            ["--tie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights"],
            "not allowed with argument",
        ),
        (["--fp4-format", "e2m1"], "--fp4-format e2m1 is not supported: --fp8-format is"),
        (["--dry-run"], "--dry-run needs --world-size N"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str) -> None:
    refused(lambda: check_flags(parse_args([*COMPLETE, *argv])), message)


def test_all_mistakes_are_told_at_once() -> None:
    words = (
        "--num-layers many --hidden-sise 64 --fp4-format e2m1 --qk-clip --zzz 1 2 "
        "--lr-decay-style steps --learning-rate 1e-3 --rampup-batch-size 1 --mock-data"
    )
    head, *lines = lines_for(words.split())
    starts = [
        *("argument --num-layers:", "argument --lr-decay-style:", "argument --rampup-batch-size:"),
        *("--hidden-sise 64 is unknown", "--zzz 1 2 is unknown", "--learning-rate 1e-3 is unknown"),
        *("--qk-clip is not supported", "--fp4-format e2m1 is not supported"),
        *("--num-attention-heads is missing", "--seq-length is missing"),
        *("--micro-batch-size is missing", "--train-iters or --train-samples is missing"),
    ]
    assert head == f"{len(starts)} mistakes:"
    for start in starts:
        assert len([line for line in lines if line.startswith(f"  {start}")]) == 1, start
    assert len(lines) == len(starts), lines


def test_a_bare_start_names_all_that_is_needed_and_an_example() -> None:
    text = "\n".join(lines_for([]))
    for flag in (*NEEDED, "--tokenizer-type", "--llama-preset", "--data-path"):
        assert flag in text.replace(EXAMPLE, ""), flag
    assert text.endswith(EXAMPLE)
    assert not any(EXAMPLE in line for line in lines_for(["--lr", "1"]))


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--optimizer.lr", "--lr"),
        ("--fsdp", "--paro-strategy"),
        ("--compile", "--torch-compile inductor"),
        ("--nproc-per-node", "torchrun"),
    ],
)
def test_a_name_of_another_framework_is_translated(flag: str, meant: str) -> None:
    refused(lambda: check_flags(parse_args([*COMPLETE, flag, "7"])), f"{flag} 7 ... {meant}")


@pytest.mark.parametrize(
    ("name", "other", "values"),
    [
        ("--override-opt_param-scheduler", "--override-opt-param-scheduler", []),
        ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler", []),
        ("--save-interval", "--persistent-save-interval", ["7"]),
    ],
)
def test_both_spellings_are_one(name: str, other: str, values: list[str], tmp_path: Path) -> None:
    assert parse_args([other, *values]) == parse_args([name, *values]) != parse_args([])
    path = tmp_path / "flags.yaml"
    path.write_text(f"{other.removeprefix('--')}: {values[0] if values else 'true'}\n")
    of_file = vars(parse_args(["--yaml-cfg", str(path)])) | {"yaml_cfg": None}
    assert of_file == vars(parse_args([name, *values]))


def test_a_value_is_spelled_as_words_that_give_it() -> None:
    def parsed(words: Sequence[str], dest: str) -> object:
        return getattr(build_parser().parse_known_args(words)[0], dest, None)

    defaults = build_parser().parse_known_args([])[0]
    for action in build_parser()._actions[1:]:  # the first is --help
        dest, count = action.dest, action.nargs if isinstance(action.nargs, int) else 1
        values = [getattr(defaults, dest, None)]
        for option in action.option_strings:
            for word in action.choices or ("text", "8", str(action.metavar)):
                with suppress(ArgumentError):
                    values.append(parsed([option, *[str(word)] * count], dest))
                    assert spelled(dest, values[-1]), option
                    if not action.choices:
                        break
            assert len(values) > 1, option
        for value in values:
            if words := spelled(dest, value):
                assert parsed(words, dest) == value, words
    assert spelled("apply_rope_fusion", True) == spelled("lora_rank", None) == []
    assert spelled("apply_rope_fusion", False) == ["--no-rope-fusion"]
    assert option_of("no_argument") == "--no-argument"


def test_hints_lead_to_flags_that_do_something() -> None:
    known = build_parser()._option_string_actions.keys()
    for name, meaning in SYNONYMS.items():
        assert f"--{name}" not in known, f"{name} is no other framework's"
        assert set(re.findall(r"--[a-z][\w-]*", meaning)) <= known, name
    table = tomllib.loads(Path(flag_parser.__file__).with_name("synonyms.toml").read_text())
    names = " ".join(names for names, _ in table["names"]).split()
    assert len(names) == len(set(names))
    # Typing errors in a flag that is refused.
    for slip in ("--fp8-formats", "--sequence-paralel", "--num-expert"):
        assert set(re.findall(r"--[\w-]+", hint_for(slip, build_parser()))) <= known, slip
    for flag in make_parser()._option_string_actions.keys() - known:
        assert "tools/plan.py" in hint_for(flag, build_parser()), flag


YAML = """
# comments are welcome
num-layers: 4
hidden_size: 128
lr: 3e-4
bf16: true
mock_data: false
yarn_correction_range_round_to_int: false
data-path: [corpus]
rampup-batch-size: [8, 8, 96]
split: 98,1,1
save: null
"""


def test_a_file_and_the_command_line_are_one_and_the_latter_wins(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    file = ["--yaml-cfg", str(tmp_path / "run.yaml")]
    assert parse_args([*file, "--hidden-size", "256"]).hidden_size == 256
    from_file = vars(parse_args(file))
    argv = (
        "--num-layers 4 --hidden-size 128 --lr 3e-4 --bf16 --data-path corpus "
        "--rampup-batch-size 8 8 96 --split 98,1,1 --no-yarn-correction-range-round-to-int"
    )
    from_words = vars(parse_args(argv.split()))
    assert from_file.pop("yaml_cfg") is not from_words.pop("yaml_cfg")
    assert from_file == from_words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-layer: 4", "num-layer is unknown: did you mean --num-layers?"),
        ("tensor-model-parallel-size: two", "tensor-model-parallel-size: invalid int value"),
        ("lr: 1e400", "--lr: argument --lr: 1e400 is not a finite number"),
        # A value is the text that stands there: no number or date is made of it
        ("lr: 2020-13-45", "--lr: argument --lr: invalid float value: '2020-13-45'"),
        ("lr: !!int ''", "line 1: tag:yaml.org,2002:int is a tag"),
        ("save: !!python/object/apply:os.getcwd []", "is a tag"),
        ('save: "a\\0b"', "line 1: a value has a character that no word"),
        ("data-path: [--lr, 5]", "--data-path: needs values, of which none is a flag"),
        ("bf16: y", "bf16: a switch is true or false, not y"),
        ("? [lr, seed]\n: 1", "must hold one level of `flag: value`"),
        ("lr: \0", "is no YAML: unacceptable character"),
        ("num-layers: [4]", "num-layers: takes one value, not [4]"),
        ("save: {here: there}", "save: needs a plain value"),
        ("num-layers: 4\nnum_layers: 5", "num-layers is given more than once"),
        # Files that grow
        ("a: &a [x, x]\nb: &b [*a, *a]", "line 1: anchors and aliases"),
        ("lr: " + "[" * 1000, "line 1: is nested too deeply"),
        ("# " + "x" * 2**16, "has 65,538 bytes, more than the 65,536 that may be read"),
        ("".join(f"a{number}: 1\n" for number in range(1500)), "has 1500 keys, and there are"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    (line,) = lines_for([*COMPLETE, "--yaml-cfg", str(path)])
    assert line.startswith(f"--yaml-cfg {path}") or "is not supported" in line
    assert message in line


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    words = ["--yaml-cfg", str(tmp_path / "none.yaml")]
    refused(lambda: parse_args(words), "--yaml-cfg ... none.yaml cannot be read: No such file")


VALUED = [action for action in build_parser()._actions if action.nargs != 0]


@pytest.mark.parametrize(
    ("value", "message", "of_paths"),
    [("--", "expected", False), ("", "the path is empty", True), ("x" * 256, "too long", True)],
)
def test_no_flag_takes_what_is_no_value(value: str, message: str, *, of_paths: bool) -> None:
    flags = [a.option_strings[0] for a in VALUED if not of_paths or a.metavar in PATHS]
    with pytest.raises(UserError) as caught:
        parse_args([f"{flag}={value}" for flag in flags if flag != "--yaml-cfg"], trains=False)
    found = {
        line.split()[1].split("/")[0].strip(":") for line in caught.value.args if message in line
    }
    assert found == {*flags} - {"--yaml-cfg"}
    assert len(found) > (15 if of_paths else 100)


# Every flag that takes numbers, and how many.
NUMBERS = {
    action.option_strings[0]: action.nargs if isinstance(action.nargs, int) else 1
    for action in build_parser()._actions
    if getattr(action.type, "__name__", "") in ("int", "float")
}


@pytest.mark.parametrize("value", ["inf", "nan", "-1e400"])
def test_no_flag_takes_what_is_no_finite_number(value: str) -> None:
    words = []
    for flag, count in NUMBERS.items():
        words += [flag] + [f" {value}"] * count  # "-1e400" alone is a flag
    with pytest.raises(UserError) as caught:
        parse_args(words, trains=False)
    refused = {re.findall(r"--[\w-]+", line)[0] for line in caught.value.args}
    assert refused >= NUMBERS.keys()
    assert f"argument --lr: {value} is not a finite number" in caught.value.args
