"""The errors that end a run in one line, and what becomes one."""

from __future__ import annotations

import errno
import os
import pickle
from itertools import pairwise

import pytest
import torch

from paro.errors import (
    PeerError,
    RunError,
    StorageError,
    UserError,
    about,
    describe,
    for_all_ranks,
    is_memory_failure,
    is_storage_failure,
    lost_peer,
    open_files_limit,
    printable,
    reading,
    type_and_message,
    writing,
)
from tests.helpers.refusals import says


def test_mistakes_are_one_line_each() -> None:
    assert str(UserError("a\n b")) == "a b"
    several = UserError("a\n b", "c", example="run\n  this", on_this_rank=True)
    assert str(several) == "2 mistakes:\n  a b\n  c\nrun\n  this"
    again = pickle.loads(pickle.dumps(several))
    assert str(again) == str(several)
    assert again.on_this_rank
    assert isinstance(several, ValueError)  # for those who use the code as a library


def test_what_a_terminal_would_act_upon_is_escaped() -> None:
    hostile = "\x1b[2J\x9b31m\u202etxt\x00\udc80"
    assert str(UserError(f"{hostile}: é")) == "\\x1b[2J\\x9b31m\\u202etxt\\x00\\udc80: é"
    assert str(UserError("a", example=f"run\n  {hostile}")).isascii()
    assert describe(FileNotFoundError(2, "No such file", hostile)).isascii()
    assert describe(RuntimeError(f"{hostile}\nmore")).isascii()
    assert str(RunError(hostile)).isascii()
    assert printable("a\tb\nc") == "a\tb\nc"


def test_a_long_line_keeps_its_beginning_and_its_end() -> None:
    line = str(UserError(f"--load {'x' * 10**6} is missing"))
    assert len(f"pretrain_llama.py: error: {line}") <= 2000
    assert line.startswith("--load xx")
    assert line.endswith("xx is missing")


def test_bugs_and_storage_are_not_the_user_s_mistakes() -> None:
    with pytest.raises(ValueError, match="shorter") as bug, reading("--x"), about("a."):
        list(zip([1], [], strict=True))
    assert not isinstance(bug.value, UserError)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    remedy = "; make room or write elsewhere"
    for kind, how, end in ((reading, "read", ""), (writing, "written", remedy)):
        with pytest.raises(OSError, match="No space") as caught, kind("--x"):
            raise full
        assert is_storage_failure(caught.value)
        assert describe(caught.value) == f"--x cannot be {how}: No space left on device{end}"
    assert not is_storage_failure(FileNotFoundError(errno.ENOENT, "no"))


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]"
FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/data/c7.bin")


@pytest.mark.parametrize(
    ("error", "cause", "message"),
    [
        (FULL, None, "too many open files at /data/c7.bin ... ulimit -n"),
        (UserError("the corpus is damaged"), FULL, "at /data/c7.bin ... ulimit -n"),
        (ImportError("libx.so: cannot open: Too many open files"), None, "ulimit -n"),
        (RuntimeError("Too many open files. Communication with the workers"), None, "ulimit -n"),
        (RuntimeError(f"{GLOO.partition(']')[0]}] socket: Too many open files"), None, "ulimit -n"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), None, "fs.file-max"),
    ],
)
def test_open_files_name_the_limit(error: Exception, cause: Exception | None, message: str) -> None:
    error.__cause__ = cause
    shared = for_all_ranks(error, 3)
    assert isinstance(shared, UserError)
    line = says(str(shared), message)
    assert "corpus" not in line
    assert "again" not in line
    assert describe(error) == type_and_message(error) == open_files_limit(error) == line
    again = pickle.loads(pickle.dumps(shared))
    assert open_files_limit(again) == line
    with pytest.raises(type(error)) as caught, about("c7: ", "; write it again"), reading("c7"):
        raise error
    if isinstance(error, OSError):  # neither the file's fault nor the corpus's
        assert caught.value is error


def test_causes_of_an_error_end_where_they_lead_back_to_it() -> None:
    """As where one process raises what its ranks agreed on, from the same error."""
    error, other = UserError("x"), RuntimeError("y")
    for causes in ((error, error), (error, other, error)):
        for one, cause in pairwise(causes):
            one.__cause__ = cause
        assert open_files_limit(error) is None
        assert lost_peer(error) is None


ASKED = "where 20.00 MiB were asked for and 1.20 GiB were free"
ON_DEVICE = """CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of \
139.80 GiB of which 1.20 GiB is free. If reserved but unallocated memory is large try setting \
PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."""


def test_memory_that_runs_out_is_no_bug() -> None:
    for error, message in (
        (torch.OutOfMemoryError(ON_DEVICE), f"out of device memory, {ASKED}"),
        (MemoryError(), "out of host memory"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "out of device memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of host memory"),
    ):
        assert is_memory_failure(error)
        assert describe(error) == message
        assert not is_memory_failure(RuntimeError("shapes differ"))


def test_what_other_ranks_raise() -> None:
    mistake = UserError("a")
    assert for_all_ranks(mistake, 3) is mistake
    full = for_all_ranks(OSError(errno.EIO, "Input/output error", "/data"), 3)
    assert (type(full), str(full)) == (StorageError, "Input/output error: /data")
    no_memory = for_all_ranks(MemoryError(), 3)
    assert (type(no_memory), str(no_memory)) == (RunError, "out of host memory")
    bug = for_all_ranks(KeyError("x"), 3)
    assert (type(bug), str(bug)) == (PeerError, "rank 3 failed: KeyError: 'x'")
    assert for_all_ranks(bug, 1) is bug


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GLOO, "Connection closed by peer [::1]"),
        (f"a message from rank 1 failed: {GLOO}", "a message from rank 1 failed: Connection close"),
        ("[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] 4 vs 2", None),
        ("a collective failed on this rank", None),
    ],
)
def test_a_lost_connection_is_the_fault_of_another_rank(text: str, message: str | None) -> None:
    for error in (RuntimeError(text), RuntimeError("outer")):
        if error.args[0] == "outer":
            error.__cause__ = RuntimeError(text)
        lost = lost_peer(error)
        assert (lost is None) == (message is None)
        if lost is not None and message is not None:
            assert lost.startswith("no connection to another rank, which has ended, hangs or is ")
            assert message in lost
    assert lost_peer(ValueError(GLOO)) is None


def test_an_error_of_ours_after_a_lost_connection_is_no_lost_connection() -> None:
    lost = RuntimeError(GLOO)
    ours = AttributeError("no such field")
    ours.__context__ = lost
    assert lost_peer(ours) is None
    ours.__cause__ = lost
    assert lost_peer(ours) is not None
