"""The parser: Megatron's defaults, mistakes as one line, flags from a file."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paro.arguments import build_parser, parse_args
from tests.helpers.ranks import ROOT


@pytest.mark.parametrize(
    ("dest", "default"),
    [
        ("adam_beta2", 0.999),
        ("clip_grad", 1.0),
        ("distributed_timeout_minutes", 10),
        ("eval_interval", 1000),
        ("eval_iters", 100),
        ("exit_signal", "SIGTERM"),
        ("hysteresis", 2),
        ("initial_loss_scale", 2.0**32),
        ("log_interval", 100),
        ("lr_decay_style", "linear"),
        ("make_vocab_size_divisible_by", 128),
        ("num_workers", 2),
        ("seed", 1234),
        ("weight_decay", 0.01),
        ("weight_decay_incr_style", "constant"),
    ],
)
def test_defaults_are_megatrons(dest: str, default: object) -> None:
    assert getattr(parse_args([]), dest) == default


def test_every_flag_says_what_it_does() -> None:
    for action in build_parser()._actions:
        assert action.help, action.option_strings
        assert len(action.help) > 10, action.option_strings


def test_help_works_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; "
        "from paro.arguments import parse_args; parse_args(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--paro-strategy" in done.stdout


def test_help_teaches_a_command_that_trains(tmp_path: Path) -> None:
    text = build_parser().format_help()
    (command,) = re.findall(r"^ +(python pretrain_llama(?:.*\\\n)+.*)$", text, re.M)
    script = str(ROOT / "pretrain_llama.py")
    words = shlex.split(command.replace("\\\n", " ").replace("pretrain_llama.py", script))
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 5  # the first and every fifth
    assert losses[-1] < losses[0] - 1


def test_flags_in_help_are_in_one_piece() -> None:
    text = build_parser().format_help()
    assert not re.search(r"--[a-z-]*-\n", text)
    preamble = text[: text.index("\noptions:\n")]
    known = {option for action in build_parser()._actions for option in action.option_strings}
    named = set(re.findall(r"--[a-z][a-z0-9-]+", preamble)) - {"--nproc-per-node"}
    assert len(named) > 15
    assert named <= known
    assert max(map(len, preamble.splitlines())) <= 90


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "many"], "argument --num-layers: invalid int value: 'many'"),
        (["--lr-decay-style", "steps"], "argument --lr-decay-style: invalid choice: 'steps'"),
        (["--paro-strategi", "IIG"], "--paro-strategi IIG (did you mean --paro-strategy?)"),
        (["--train", "100"], "unrecognized arguments: --train 100"),
        (["--zzz"], "unrecognized arguments: --zzz (--help lists all flags)"),
        (["--rampup-batch-size", "1", "2"], "expected 3 arguments"),
        (
            ["--tie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights"],
            "not allowed with argument",
        ),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="argument") as error:
        parse_args(argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


YAML = """
# comments are welcome
num-layers: 4
hidden_size: 128
lr: 3e-4
bf16: true
mock_data: false
data-path: [corpus]
rampup-batch-size: [8, 8, 96]
split: 98,1,1
save: null
"""


def test_a_file_of_flags(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    args = parse_args(["--yaml-cfg", str(tmp_path / "run.yaml"), "--hidden-size", "256"])
    assert (args.num_layers, args.lr, args.bf16, args.mock_data) == (4, 3e-4, True, False)
    assert args.hidden_size == 256, "the command line wins"
    assert args.data_path == ["corpus"]
    assert args.rampup_batch_size == [8, 8, 96]
    assert args.split == "98,1,1"
    assert args.save is None


def test_a_file_and_the_command_line_are_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    from_file = vars(parse_args(["--yaml-cfg", str(tmp_path / "run.yaml")]))
    argv = (
        "--num-layers 4 --hidden-size 128 --lr 3e-4 --bf16 --data-path corpus "
        "--rampup-batch-size 8 8 96 --split 98,1,1"
    )
    from_words = vars(parse_args(argv.split()))
    assert from_file.pop("yaml_cfg") is not from_words.pop("yaml_cfg")
    assert from_file == from_words


def test_an_empty_file_gives_no_flag(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert parse_args([f"--yaml-cfg={tmp_path / 'run.yaml'}"]).num_layers is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-layer: 4", "num-layer is no flag"),
        ("yaml-cfg: other.yaml", "yaml-cfg is no flag"),
        ("num-layers: four", "num-layers: argument --num-layers: invalid int value: 'four'"),
        ("num-layers: 4.5", "num-layers: argument --num-layers: invalid int value: '4.5'"),
        ("num-layers: true", "num-layers: needs a plain value, not True"),
        ("num-layers: [4]", "num-layers: takes one value, not [4]"),
        ("model: {num-layers: 4}", "model is no flag"),
        ("save: {here: there}", "save: needs a plain value"),
        ("bf16: 1", "bf16: a switch is true or false, not 1"),
        ("lr-decay-style: steps", "lr-decay-style: argument --lr-decay-style: invalid choice"),
        ("rampup-batch-size: [1, 2]", "rampup-batch-size: argument --rampup-batch-size: expected"),
        ("num-layers: 4\nnum-layers: 5", "num-layers is given more than once"),
        ("num-layers: 4\nnum_layers: 5", "num-layers is given more than once"),
        ("- num-layers", "must hold one level of `flag: value`"),
        ("num-layers: [4", "is no YAML"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="--yaml-cfg") as error:
        parse_args(["--yaml-cfg", str(path)])
    assert str(error.value).startswith(f"--yaml-cfg {path}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--yaml-cfg .*none\.yaml cannot be read: No such file"):
        parse_args(["--yaml-cfg", str(tmp_path / "none.yaml")])
