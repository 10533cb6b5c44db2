"""Every byte of a checkpoint has a checksum: changes are found and named."""

from __future__ import annotations

import errno
import io
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paro.checkpoint.load import LoadRequest
from paro.checkpoint.manifest import MANIFEST, DamagedError, read_manifest
from paro.untrusted.checksum import crc32
from tests.helpers.refusals import refused
from tests.paro.checkpoint.toy_run import (
    IIG,
    ONE,
    all_shards,
    assert_true,
    load_checkpoint,
    make_shards,
    save_checkpoint,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints, the older one of zeros; returns the folder of the newer."""
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=False), {})
    save_checkpoint(tmp_path, 200, all_shards(IIG), {"arguments": {"lr": 0.1}})
    return tmp_path / "iter_0000200"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_lists_every_file_the_arguments_and_the_versions(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.arguments == {"lr": 0.1}
    assert json.loads((saved / MANIFEST).read_text())["versions"].keys() >= {"python", "torch"}
    sizes = {path.name: path.stat().st_size for path in saved.iterdir() if path.name != MANIFEST}
    assert {
        name: sum(part.length for part in file) for name, file in manifest.files.items()
    } == sizes
    assert manifest.verify() == sum(sizes.values())


@pytest.mark.parametrize("seed", range(12))
def test_one_bit_anywhere_is_found(saved: Path, seed: int) -> None:
    drawn = random.Random(seed)
    path = drawn.choice(sorted(saved.iterdir()))
    flip(path, drawn.randrange(path.stat().st_size))
    refused(lambda: read_manifest(saved).verify(), path.name)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def damage(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.json", MANIFEST])
@pytest.mark.parametrize("harm", [Path.unlink, cut_short, damage, lengthen])
def test_a_damaged_newest_one_is_named_and_passed_over(
    saved: Path, name: str, harm: Callable[[Path], None]
) -> None:
    harm(saved / name)
    shards = make_shards(ONE, 0, filled=True)
    lines: list[str] = []
    common = load_checkpoint(saved.parent, shards, log=lines.append)
    assert common["iteration"] == 100
    assert not any(shard.values.any() for shard in shards)
    assert lines[0].startswith("  passing over iteration 200: ")
    assert name in lines[0]
    assert "\n" not in lines[0]
    refused(
        lambda: load_checkpoint(saved.parent, shards, wanted=LoadRequest(iteration=200)),
        f"--load {saved.parent}: ... {name} ... another --ckpt-step",
    )


@pytest.mark.parametrize("name", [MANIFEST, "common.json", ".metadata", "__0_0.distcp"])
def test_a_process_without_open_files_left_passes_over_no_checkpoint(
    saved: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(own: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, *words: Any, **named: Any) -> Any:
            if str(path).endswith(name):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return own(path, *words, **named)

        return opened

    monkeypatch.setattr(os, "open", limited(os.open))
    monkeypatch.setattr(io, "open", limited(io.open))  # which Path.open calls
    lines: list[str] = []
    shards = make_shards(ONE, 0, filled=True)
    load = partial(load_checkpoint, saved.parent, shards, log=lines.append)
    line = refused(load, f"{saved / name} ... ulimit -n")
    assert "damaged" not in line
    assert lines == []


def test_a_converted_model_behind_a_damaged_one_has_no_moments_of_that(tmp_path: Path) -> None:
    parameters = [s for s in make_shards(ONE, 0, filled=True) if s.state == "param"]
    save_checkpoint(tmp_path, 0, parameters, {"parameters_only": True})
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=True), {})
    (file,) = (tmp_path / "iter_0000100").glob("*.distcp")
    damage(file)
    shards = make_shards(ONE, 0, filled=True)  # as if the damage were found late
    common = load_checkpoint(tmp_path, shards)
    assert common["iteration"] == 0
    assert_true([shard for shard in shards if shard.state == "param"])
    assert not any(shard.values.any() for shard in shards if shard.state != "param")


def test_where_none_is_whole_the_newest_ones_fault_is_told(saved: Path) -> None:
    damage(saved / "__0_0.distcp")
    (saved.parent / "iter_0000100" / MANIFEST).unlink()
    shards = make_shards(ONE, 0, filled=False)
    told = "__0_0.distcp is damaged ... no checkpoint there is whole"
    refused(lambda: load_checkpoint(saved.parent, shards), told)


def test_a_newer_format_is_refused_and_not_passed_over(saved: Path) -> None:
    path = saved / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    shards = make_shards(ONE, 0, filled=False)
    told = "has format 99 ... use the version that wrote it"
    refused(lambda: load_checkpoint(saved.parent, shards), told)


def test_a_file_that_is_not_listed_is_not_read(saved: Path) -> None:
    """As if the metadata were replaced without the manifest."""
    manifest = read_manifest(saved)
    with pytest.raises(DamagedError, match="other is not in"):
        manifest.check_sizes(["other"])
    load_checkpoint(saved.parent, shards := make_shards(ONE, 0, filled=False))
    assert_true(shards)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda facts: facts.update(iteration=-3), "iteration: -3 is not allowed"),
        (lambda facts: facts.update(files=[]), r"files: \[\] is of the wrong type"),
        (lambda facts: facts["files"].update({"../x": {"crc32": []}}), r"files\.\.\./x: is no"),
        (lambda facts: facts["files"].update(x={"crc32": [[1]]}), r"files\.x\.crc32\[0\]"),
        (lambda facts: facts.update(format_version="\x1b[2J"), "format_version: '.x1b"),
    ],
)
def test_a_forged_one_with_a_right_checksum(saved: Path, forge: Any, message: str) -> None:
    path = next(saved.rglob(MANIFEST))
    facts = json.loads(path.read_text())
    del facts["crc32"]
    forge(facts)
    text = json.dumps(facts, sort_keys=True).encode()
    path.write_text(json.dumps({**facts, "crc32": crc32(text)}))
    with pytest.raises(DamagedError, match=rf"{MANIFEST} is damaged \({message}") as caught:
        read_manifest(path.parent)
    assert str(caught.value).isprintable()
