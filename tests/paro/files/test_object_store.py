"""Objects by URLs: reads by ranges that are fetched once, faults of a store, what is refused."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paro.arguments.parser import build_parser
from paro.errors import UserError
from paro.files import object_cache, object_store, waits
from paro.files.atomic_file import check_folder
from paro.files.object_cache import (
    BLOCK_BYTES,
    CachedObject,
    ObjectCache,
    local_copy,
    staging_folder,
)
from paro.files.object_store import StorePath, path_of, store_timeout
from paro.files.regular_file import RegularFile, paths_in, read_bytes
from tests.helpers.object_server import BUCKET, SECRET, ObjectServer
from tests.helpers.refusals import refused, says

pytestmark = pytest.mark.process
CONTENT = os.urandom(5 * BLOCK_BYTES // 2)


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with ObjectServer().running() as server:
        yield server


@pytest.fixture
def server(running: ObjectServer, tmp_path: Path, monkeypatch: Any) -> ObjectServer:
    """The server without faults, and a cache of its own."""
    running.requests.clear()
    running.recovers()
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "cache")
    monkeypatch.setattr(object_cache, "_AHEAD", 0)
    return running


@pytest.fixture
def stored(server: ObjectServer, tmp_path: Path) -> StorePath:
    path = path_of(f"s3://{BUCKET}/{tmp_path.name}/x.bin")
    assert isinstance(path, StorePath)
    path.write_bytes(CONTENT)
    return path


def test_a_url_stays_one_in_every_path_made_of_it() -> None:
    url = path_of("s3://bucket/a/b")
    made = url, url / "c", url.parent, url.with_suffix(".x"), pickle.loads(pickle.dumps(url))
    assert [*map(str, made)] == [
        *("s3://bucket/a/b", "s3://bucket/a/b/c", "s3://bucket/a", "s3://bucket/a/b.x"),
        "s3://bucket/a/b",
    ]
    assert {*map(type, made)} == {StorePath}
    assert type(path_of("a/b")) is not StorePath
    for wrong in ("s3://key:secret@bucket/a", "s3:///a"):
        line = refused(partial(path_of, wrong), "s3://BUCKET/KEY")
        assert "secret" not in line


def test_a_range_is_fetched_once_however_many_read_it(
    server: ObjectServer, stored: StorePath
) -> None:
    server.requests.clear()
    readers = [CachedObject(stored) for _ in range(8)]
    places = [(0, 10), (BLOCK_BYTES - 3, 9), (5, len(CONTENT) - 5), (len(CONTENT) - 1, 1)]
    with ThreadPoolExecutor(8) as threads:
        for begin, length in places:
            for content in threads.map(lambda each: each.read(begin, length), readers):  # noqa: B023
                assert content == CONTENT[begin : begin + length]
    fetched = server.fetched(f"/{'/'.join(stored.parts[1:])}")
    assert len(fetched) == len({*fetched}) == 3
    file = RegularFile(stored)
    assert (file.size, file.read(7, 3)) == (len(CONTENT), CONTENT[7:10])
    stored.write_bytes(b"other")  # is another object for who opens it now
    assert RegularFile(stored).read(0, 5) == b"other"


def test_blocks_beyond_the_limit_are_removed_and_fetched_again(
    server: ObjectServer, stored: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectCache, "most_bytes", BLOCK_BYTES + 2**16)
    monkeypatch.setattr(ObjectCache, "kept_between", 1)
    reader = CachedObject(stored)
    for _ in range(2):
        assert reader.read(0, len(CONTENT)) == CONTENT
    ObjectCache.make_room()
    blocks = [path for path in ObjectCache.folder.glob("blocks/*/*") if path.suffix != ".lock"]
    assert sum(path.stat().st_size for path in blocks) <= ObjectCache.most_bytes


def test_looks_at_a_large_cache_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs what all blocks do: without it a cache of 500,000 would take seconds each."""
    monkeypatch.setattr(ObjectCache, "folder", tmp_path)
    monkeypatch.setattr(ObjectCache, "_until_look", 0)
    looks: list[int] = []
    monkeypatch.setattr(ObjectCache, "make_room", lambda: looks.append(1) or 64 * 100)
    for number in range(201):
        ObjectCache.keep(tmp_path / str(number), b"1")
    assert len(looks) == 3


def test_the_default_folder_is_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_DEFAULT", "ObjectCache.folder"):
        monkeypatch.setattr(f"paro.files.object_cache.{name}", tmp_path / "default")
    (tmp_path / "default").mkdir(mode=0o777)
    ObjectCache.made()
    assert stat.S_IMODE((tmp_path / "default").stat().st_mode) == 0o700
    (tmp_path / "default").rename(tmp_path / "elsewhere")
    (tmp_path / "default").symlink_to(tmp_path / "elsewhere")
    refused(ObjectCache.made, str(tmp_path / "default"), "--object-storage-cache-path")
    (tmp_path / "default").unlink()
    (tmp_path / "default").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    refused(ObjectCache.made, str(tmp_path / "default"), "--object-storage-cache-path")


def test_files_on_their_way_stay_while_any_process_uploads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectCache, "folder", tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # in another container
    (tmp_path / "upload-of_a_killed_run").mkdir()
    with staging_folder() as one:
        (one / "file").touch()
        with staging_folder() as other:
            assert {*tmp_path.iterdir()} == {one, other}
        assert (one / "file").exists()
    assert not [*tmp_path.iterdir()]


def test_a_block_is_fetched_ahead_once_however_short_the_reads_are(
    server: ObjectServer, stored: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "_AHEAD", 8)
    threads = mock.Mock()  # that fetch nothing yet
    monkeypatch.setattr(object_cache, "_threads", lambda _: threads)
    reader = CachedObject(stored)
    for begin in range(5):
        assert reader.read(begin, 1) == CONTENT[begin : begin + 1]
    asked = threads.apply_async.call_args_list
    assert [call.args[1] for call in asked] == [(1,), (2,)]
    for call in asked:
        call.args[0](*call.args[1])
    shutil.rmtree(ObjectCache.folder)  # as programs do that tidy the temporary folder
    assert reader.read(5, 1) == CONTENT[5:6]
    assert reader.read(2 * BLOCK_BYTES, 9) == CONTENT[2 * BLOCK_BYTES :][:9]
    assert [call.args[1] for call in asked][:4] == [(1,), (2,), (1,), (2,)]


def test_a_process_ends_without_a_wait_for_what_is_fetched_ahead() -> None:
    ahead = "_threads(os.getpid()).apply_async(time.sleep, (600,)); time.sleep(0.1)"
    code = f"import os, time; from paro.files.object_cache import _threads; {ahead}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("how", ["500", "503", "truncated"])
def test_a_fault_that_passes_is_tried_again(
    server: ObjectServer, stored: StorePath, how: str
) -> None:
    server.fails(how, "GET", "x.bin", times=3)
    assert CachedObject(stored).read(0, len(CONTENT)) == CONTENT
    server.fails(how if how != "truncated" else "500", "PUT", "y.bin")
    stored.with_name("y.bin").write_bytes(b"1")
    assert read_bytes(stored.with_name("y.bin")) == b"1"


def test_a_store_that_is_gone_is_waited_for_with_a_limit_and_a_line(
    server: ObjectServer,
    stored: StorePath,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waits, "NOTICE_AFTER_SECONDS", 0.0)
    # Each look at a clock is 0.4 s later: the limit is met after few attempts on any machine.
    monkeypatch.setattr(waits, "time", mock.Mock(monotonic=count(0.0, 0.4).__next__))
    server.fails("truncated", "GET", times=100)
    with store_timeout(1.0), pytest.raises(TimeoutError) as caught:
        stored.read_bytes()
    says(str(caught.value), str(stored), "waited")
    assert f"waiting for the object store of {stored}" in capfd.readouterr().err
    # A client asks no longer than its caller waits: else an attempt would be five with pauses.
    server.recovers()
    server.fails("500", "GET", times=100)
    server.requests.clear()
    with store_timeout(0), pytest.raises(TimeoutError):
        stored.read_bytes()
    assert len(server.fetched(f"/{'/'.join(stored.parts[1:])}")) == 1
    server.recovers()
    server.fails("403", times=100)
    line = refused(partial(read_bytes, stored), str(stored), "credentials")
    assert SECRET not in line
    refused(
        partial(check_folder, "--input", stored.parent), f"--input {stored.parent}", "credentials"
    )


def test_an_upload_of_which_a_store_takes_nothing_is_sent_again(
    server: ObjectServer, stored: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than fits the buffers of both ends, so that the client cannot end its request."""
    monkeypatch.setattr(object_store, "_SILENT_SECONDS", 1)
    object_store._file_system.cache_clear()
    server.fails("hangs", "PUT", "y.bin")
    server.requests.clear()
    stored.with_name("y.bin").write_bytes(bytes(2**25))
    object_store._file_system.cache_clear()
    # More than twice where a loaded machine is silent too.
    methods = [method for method, path, _ in server.requests if path.endswith("y.bin")]
    assert methods[:2] == ["PUT", "PUT"]
    assert stored.with_name("y.bin").read_bytes() == bytes(2**25)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("scheme", "package", "variable", "address"),
    [
        ("gs", "gcsfs", "STORAGE_EMULATOR_HOST", "http://{}"),
        (
            *("az", "adlfs", "AZURE_STORAGE_CONNECTION_STRING"),
            "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;BlobEndpoint=http://{}/a;",
        ),
    ],
)
def test_an_upload_of_which_another_store_takes_nothing_fails(
    scheme: str, package: str, variable: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit for what is sent it never ends: the server accepts, and reads nothing."""
    pytest.importorskip(package, reason="pip install -r requirements-peers.txt")
    monkeypatch.setattr(object_store, "_SILENT_SECONDS", 1)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # no credentials are asked of Google's machines
    object_store._file_system.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(variable, address.format(f"127.0.0.1:{server.getsockname()[1]}"))
        path = path_of(f"{scheme}://{BUCKET}/x")
        with store_timeout(0), pytest.raises(TimeoutError) as caught:
            path.write_bytes(bytes(2**25))
    object_store._file_system.cache_clear()
    says(str(caught.value), str(path), "waited")


class TransportError(Exception):
    """An error that only its name explains, as of Google's library for credentials."""


def answer(text: str = "", **status: object) -> Exception:
    """An error of Azure's library, or of Google's for a status that is called code."""
    error = Exception(text)
    vars(error).update(status)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (answer(status_code=503), None, ""),
        (answer(code="429"), None, ""),
        (TransportError(), None, ""),
        (answer(status_code=404), FileNotFoundError, "No such file"),
        (answer("it is there", status_code=409), PermissionError, "the request: "),
        (answer("who?", code=401), PermissionError, "the credentials (is a token old?): "),
        (OSError("Forbidden: b/x"), PermissionError, "the credentials (is a token old?): "),
        (OSError(22, "Bad Request"), PermissionError, "the credentials (is a token old?): "),
        (ValueError("Invalid bucket"), PermissionError, "the request: "),
    ],
)
def test_errors_of_other_stores_are_told_apart(
    error: Exception, kind: type[OSError] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = mock.Mock(cat_file=mock.Mock(side_effect=[error, b"1"]))
    monkeypatch.setattr(object_store, "_file_system", lambda *_: store)
    path = StorePath("gs://bucket/x")
    if kind is None:
        assert path.read_bytes() == b"1"
        return
    with pytest.raises(kind) as caught:
        path.read_bytes()
    says(str(caught.value), message, str(path))


def test_a_missing_package_or_account_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "adlfs", None)  # also where it is installed
        refused(partial(path_of, "az://b/x"), "az://b/x", "adlfs")
    damaged = mock.Mock(side_effect=ImportError("no module aiohttp"))
    monkeypatch.setattr(fsspec, "get_filesystem_class", damaged)
    with pytest.raises(UserError, match="az:// needs adlfs, whose import fails: no module aiohttp"):
        StorePath("az://bucket/x").read_bytes()
    opened = mock.Mock(side_effect=ValueError("Must provide an account"))
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _: opened)
    path = StorePath("az://bucket/x")
    refused(partial(read_bytes, path), str(path), "Must provide an account")


def test_only_one_creates_an_object(server: ObjectServer, stored: StorePath) -> None:
    lock = stored.with_name("lock")
    with ThreadPoolExecutor(4) as threads:
        created = [*threads.map(lock.create, [b"%d" % number for number in range(4)])]
    assert sum(created) == 1
    assert lock.read_bytes() == b"%d" % created.index(True)


def test_folders_are_what_keys_have_in_common(
    server: ObjectServer, stored: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored.parent
    (folder / "sub" / "y").write_bytes(b"12")
    assert [path.name for path in paths_in(folder, "*")] == ["sub", "x.bin"]
    assert ((folder / "sub").is_dir(), stored.is_dir(), (folder / "z").exists()) == (
        *(True, False, False),
    )
    assert paths_in(folder / "none", "*") == []
    for name, content in (("empty", b""), ("weights", b"1234")):
        (folder / "sub" / name).write_bytes(content)
    monkeypatch.setattr(object_cache, "MAX_BYTES", 3)
    copy = Path(local_copy(str(folder / "sub")))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {"y": b"12", "empty": b""}
    refused(partial(local_copy, str(folder / "sub" / "weights")), "sub/weights has 4 bytes")
    assert local_copy(str(copy)) == str(copy)
    (folder / "sub").remove_tree()  # type: ignore[attr-defined]
    assert not (folder / "sub").exists()
    refused(partial(stored.open, "rb"), str(stored))


def test_a_url_that_a_flag_does_not_take_is_refused() -> None:
    for words, message in (
        ("--data-path gcs://b/x", "gcs://b/x ... s3://, gs://, az://"),
        ("--metrics-file s3://b/x", "--metrics-file ... local"),
        ("--tokenizer-model msc://b/x", "msc://b/x"),
        ("--enable-msc --load msc://b/x", "--load ... msc://b/x ... s3://, gs://, az://"),
        ("--object-storage-cache-path s3://b/x", "--object-storage-cache-path ... local"),
    ):
        with pytest.raises(ArgumentError) as caught:
            build_parser().parse_known_args(words.split())
        says(str(caught.value), message)
