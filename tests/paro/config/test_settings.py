"""What ranks compare: every flag and value in use, but no path."""

from __future__ import annotations

import pytest

from paro.arguments.parser import parse_args
from paro.config.run import RunConfig
from paro.config.settings import code_version, path_flags, settings_of
from paro.distributed.rendezvous import first_difference
from paro.distributed.world import World
from tests.end_to_end.test_training import MODEL
from tests.helpers.refusals import says


def settings(*flags: str, world: World | None = None) -> dict[str, str]:
    args = parse_args([*MODEL, "--train-iters", "4", "--mock-data", *flags])
    return settings_of(RunConfig.from_args(args, world or World()))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--lr 1e-3", "--lr must be the same ... 0.003 on rank 0, 0.001 on rank 1"),
        ("--micro-batch-size 2", "--micro-batch-size must be the same"),
        ("--bf16", "--bf16 must be the same ... False on rank 0, True on rank 1"),
        ("--save a", "--save must be the same ... not given on rank 0"),
        ("--paro-strategy NNG", "--paro-strategy must be the same"),
    ],
)
def test_a_flag_that_differs_is_named(flags: str, told: str) -> None:
    says(first_difference({0: settings(), 1: settings(*flags.split())}), told)


def test_paths_may_differ() -> None:
    ours, theirs = ([f"--save={folder}", f"--metrics-file={folder}/m"] for folder in "ab")
    assert settings(*ours) == settings(*theirs)
    known = {"data_path", "valid_data_path", "load", "save", "tensorboard_dir", "yaml_cfg"}
    assert known <= path_flags()
    assert not {"lr", "paro_strategy", "wandb_project", "vocab_size"} & path_flags()


def test_values_that_the_launcher_decides_are_compared() -> None:
    """Nodes of unequal sizes would group their ranks differently."""
    eight, four = (
        settings("--distributed-backend", "gloo", world=World(size=8, ranks_per_node=ranks))
        for ranks in (8, 4)
    )
    told = "--paro-group-size in use must be the same on all ranks, and is 8 on rank 0, 4 on rank 1"
    assert first_difference({0: eight, 1: four}) == told


def test_the_code_is_told_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_version()
    assert len(before) == 12
    monkeypatch.setattr("paro.config.settings.data", __import__("tools"))
    assert code_version() != before
