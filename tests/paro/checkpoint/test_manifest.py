"""A checkpoint's manifest and metadata: changes are found, forged fields are named."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from paro.checkpoint.load import LoadRequest
from paro.checkpoint.manifest import MANIFEST, DamagedError, check_sizes, read_manifest
from paro.checkpoint.metadata import read_metadata
from paro.files.checksum import crc32
from tests.fixtures.write import FIXTURES
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


def flip(path: Path, position: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
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


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize("seed", range(6))
def test_one_bit_anywhere_is_found(saved: Path, seed: int) -> None:
    drawn = random.Random(seed)
    path = drawn.choice(sorted(saved.iterdir()))
    flip(path, drawn.randrange(path.stat().st_size))
    refused(lambda: read_manifest(saved).verify(), path.name)


HARMS: list[Callable[[Path], object]] = [
    *(Path.unlink, flip),
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes() + b"\0"),
]


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.json", MANIFEST])
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_passed_over(saved: Path, name: str, harm: Callable[[Path], object]) -> None:
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
        lambda: load_checkpoint(saved.parent, shards, request=LoadRequest(iteration=200)),
        f"--load {saved.parent}: ... {name} ... another --ckpt-step",
    )


@pytest.mark.parametrize("name", [MANIFEST, "common.json", ".metadata", "__0_0.distcp"])
def test_a_process_without_open_files_left_passes_over_no_checkpoint(
    saved: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Any, *words: Any, own: Callable[..., Any], **named: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return own(path, *words, **named)

    monkeypatch.setattr(os, "open", partial(opened, own=os.open))
    monkeypatch.setattr(io, "open", partial(opened, own=io.open))  # which Path.open calls
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
    flip(file)
    shards = make_shards(ONE, 0, filled=True)  # as if the damage were found late
    common = load_checkpoint(tmp_path, shards)
    assert common["iteration"] == 0
    assert_true([shard for shard in shards if shard.state == "param"])
    assert not any(shard.values.any() for shard in shards if shard.state != "param")


def test_a_file_that_is_not_listed_is_not_read(saved: Path) -> None:
    """As if the metadata were replaced without the manifest."""
    with pytest.raises(DamagedError, match="other is not in"):
        read_manifest(saved).check_sizes(["other"])
    load_checkpoint(saved.parent, shards := make_shards(ONE, 0, filled=False))
    assert_true(shards)
    # A newer format is refused, and not passed over.
    path = saved / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    message = "has format 99 ... use the version that wrote it"
    refused(lambda: load_checkpoint(saved.parent, shards), message)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda facts: facts.update(iteration=-3), "iteration: -3 is not allowed"),
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


WHOLE = FIXTURES / "2026-11-21/iii-rotated/saved/iter_0000004"
NAME = "param.blocks.0.wo"
FIRST = MetadataIndex(NAME, (0, 0))
Change = Callable[[Metadata], object]


def set_place(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        metadata.storage_data[FIRST] = replace(metadata.storage_data[FIRST], **fields)

    return change


def set_state(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        state = metadata.state_dict_metadata[NAME]
        metadata.state_dict_metadata[NAME] = replace(state, **fields)

    return change


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Change:
    return set_state(chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))])


def forged(folder: Path, change: Change) -> Path:
    """A folder whose metadata are changed after they were written."""
    metadata = read_metadata(WHOLE)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "state_dict_metadata", None),
        lambda m: m.storage_data.update({FIRST: None}),
        set_place(relative_path="../../../etc/passwd"),
        set_place(relative_path=5),
        set_place(offset=-1),
        set_place(length=0),
        lambda m: vars(m.storage_data[FIRST]).pop("length"),
        set_place(length=10**12),
        lambda m: m.storage_data.pop(FIRST),
        lambda m: m.state_dict_metadata.update({"x" * 1001: 1}),
        lambda m: m.state_dict_metadata.update({FIRST: 1}),
        lambda m: m.state_dict_metadata.update(x=1),
        set_state(size=torch.Size([-8, 8])),
        set_state(size=torch.Size([2**40, 2**40])),
        set_state(size=torch.Size([1] * 10**5)),
        set_state(properties=TensorProperties(dtype=5)),  # type: ignore[arg-type]
        set_state(chunks=[5]),
        set_state(chunks=[ChunkStorageMetadata([0], [8])]),  # type: ignore[arg-type]
        chunk((0, 0), (10**9, 8)),
        chunk((5, 0), (8, 8)),
        chunk((-1, 0), (8, 8)),
        chunk((0,), (8,)),
    ],
)
def test_a_wrong_field_is_found(change: Change, tmp_path: Path) -> None:
    folder = forged(tmp_path, change)
    with pytest.raises(DamagedError) as caught:
        read_metadata(folder)
    line = str(caught.value)
    assert line.startswith(f"{folder / '.metadata'} is damaged (")
    assert line.isprintable()
    assert len(line) < 2000


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_any_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    """States that are no tensors are left to the planner."""
    metadata = read_metadata(WHOLE)
    metadata.state_dict_metadata["x"] = BytesStorageMetadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    assert read_metadata(tmp_path) == metadata


NESTED = b"\x80\x02}))" + b"\x85" * 150_000  # {}, (), (((...)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(5), "is damaged"),
        (b"", "EOFError"),
        (b"\x80\x02]r\xff\xff\xff\x0f.", "is damaged"),
        (
            b"\x80\x02ctorch.serialization\n_get_layout\n)" + b"\x85" * 150_000 + b"R.",
            "it calls a function",
        ),
        (
            f"\x80\x02c{Metadata.__module__}\n_MEM_FORMAT_ENCODING\n)".encode("latin-1")
            + b"\x85" * 150_000
            + b"\x81.",
            "it makes an instance with arguments",
        ),
        (pickle.dumps(print), "it refers to builtins.print"),
        # Protocol 4 looks up dotted names, and the module of the metadata imports os.
        (
            f"\x80\x04\x8c%c{Metadata.__module__}\x8c\x09os.getpid\x93)R.".encode("latin-1")
            % len(Metadata.__module__),
            r"it refers to .*os\.getpid",
        ),
        (NESTED[:3] + NESTED[4:] + b"Ns.", "keys of other types"),
        (NESTED[:3] + b"(" + NESTED[4:] + b"Nu.", "keys of other types"),
        (b"\x80\x02}(K\x01Nu.", "keys of other types"),
        (f"\x80\x02c{Metadata.__module__}\nMetadata\n}}b.".encode("latin-1"), "it sets fields"),
        (b"\x80\x02]}b.", "it sets fields"),
        (pickle.dumps({1}), "it holds the opcode 143"),
        (pickle.dumps(bytearray(1), 5), "it holds the opcode 150"),
    ],
    ids=range(14),
)
def test_what_is_no_metadata(content: bytes, message: str, tmp_path: Path) -> None:
    """Nothing in it runs, and it takes no more memory than its size allows."""
    (tmp_path / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match=message):
        read_metadata(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_neither_metadata_nor_its_files_may_be_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(DamagedError, match="no regular file"):
        read_metadata(tmp_path)
    with pytest.raises(DamagedError, match="no regular file"):
        check_sizes(tmp_path, {".metadata": ()})
