"""Errors that end a run in one line, of user, machine or another rank, and printable text."""

# Everything else is a bug of ours and keeps its traceback. An error of a library or of the system
# becomes a `UserError` only around the call that reads or writes what the user named.

from __future__ import annotations

import errno
import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_MAX_LINE_CHARS = 1900  # with the name of the program before it, below 2,000
_MAX_SHOWN_CHARS = 10_000  # a blend of a hundred corpora is whole
_STORAGE_FAILURES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),  # full, or mounted read-only
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO),  # a disk or a server is gone
    *(errno.ENOTCONN, errno.EREMOTEIO, errno.EHOSTDOWN, errno.ETIMEDOUT),
)
# What torch, CUDA and cuBLAS write where they raise a plain RuntimeError.
_MEMORY_TEXTS = ("DefaultCPUAllocator: ", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# What gloo and NCCL write where a connection broke, or nothing came in time; gloo's own checks,
# which a bug of ours may fail, have other words.
_LOST_PEER = re.compile(r"\[(?!enforce)[^\]]*gloo/transport/[^\]]*\] |ncclRemoteError")
# What the system writes at the limit of open files, and Python where a process receives some.
_OUT_OF_FILES = re.compile(f"(?i){os.strerror(errno.EMFILE)}|received 0 items of ancdata")
_LIMIT, _LIMIT_OF_ALL = "ulimit -n", "fs.file-max"


class UserError(ValueError):
    """Mistakes that the user can correct; the run ends with status 2.

    Each mistake is printed in one line; several are preceded by a line with their number. An
    `example` follows on its own lines. All ranks raise it and local rank 0 prints it; with
    `on_this_rank` only one rank raises and prints it, and the launcher has to stop the others.
    """

    def __init__(self, *mistakes: str, example: str = "", on_this_rank: bool = False) -> None:
        assert mistakes, "no mistake, no error"
        super().__init__(*mistakes)
        self.example = example
        self.on_this_rank = on_this_rank

    def __str__(self) -> str:
        lines = [one_line(mistake) for mistake in self.args]
        if len(lines) > 1:
            lines = [f"{len(lines)} mistakes:", *(f"  {line}" for line in lines)]
        return "\n".join([*lines, printable(self.example)] if self.example else lines)


def check_least(least: int, meaning: str = "", /, **flags: float | None) -> None:
    """Raise `UserError` for a flag below `least`; flags are named as their attributes.

    The `meaning` of the least value follows "which", such as "is off".
    """
    which = f", which {meaning}" if meaning else ""
    for name, value in flags.items():
        if value is not None and value < least:
            raise UserError(f"{flag_of(name)} {value} must be at least {least}{which}")


def check_positive(**flags: float | None) -> None:
    """Raise `UserError` for a flag that is no finite number above 0; None is not checked.

    Flags are named as their attributes.
    """
    for name, value in flags.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag_of(name)} {value} must be a positive number")


def check_between(low: float, high: float, /, **flags: float | None) -> None:
    """Raise `UserError` for a flag outside `low` to `high`; flags are named as their attributes."""
    for name, value in flags.items():
        if value is not None and not low <= value <= high:
            raise UserError(f"{flag_of(name)} {value} must be at least {low} and at most {high}")


def flag_of(name: str) -> str:
    """Return the flag whose value an argument of this name has."""
    return f"--{name.replace('_', '-')}"


def check_multiple(what: str, size: int, micro_batch_size: int, data_parallel_size: int) -> None:
    """Raise `UserError` with the nearest valid sizes unless all ranks get equal whole
    micro-batches."""
    at_once = micro_batch_size * data_parallel_size
    if size > 0 and size % at_once == 0:
        return
    below = size // at_once * at_once
    raise UserError(
        f"{what} {size} is no multiple of --micro-batch-size {micro_batch_size} times "
        f"{count_text(data_parallel_size, 'data-parallel rank')} (= {at_once}): choose "
        + (f"{below} or {below + at_once}" if below > 0 else f"{at_once}")
    )


def contradiction(one: str, other: str, reason: str = "") -> UserError:
    """Return the error about two flags that cannot both be given, with the reason if it helps."""
    because = f"{reason}; " if reason else ""
    return UserError(f"{one} and {other} contradict each other: {because}give one of them")


class RunError(Exception):
    """The run cannot go on, by no mistake of the user and no bug; it ends with status 1.

    A state that is not finite, or no memory left; raised on all ranks, or `on_this_rank` alone.
    """

    on_this_rank = False

    def __str__(self) -> str:
        return one_line(super().__str__())


class StorageError(RunError):
    """A full disk or a lost mount, raised on all ranks; the run ends with status 1."""


class PeerError(Exception):
    """The error of ranks without a fault, which end with status 1: another prints a traceback."""


def is_storage_failure(error: BaseException) -> bool:
    """Return whether it is a full disk or a lost mount: neither the user's mistake nor ours."""
    return isinstance(error, StorageError) or (
        isinstance(error, OSError) and error.errno in _STORAGE_FAILURES
    )


def is_memory_failure(error: BaseException) -> bool:
    """Return whether an allocation failed, on the host or on the device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch.OutOfMemoryError by its name, as this file does without torch.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)


def open_files_limit(error: BaseException) -> str | None:
    """Return the limit and the remedy in a line, if too many open files caused an error."""
    met: BaseException | None = None
    for cause in _causes(error):
        met = cause if _OUT_OF_FILES.search(str(cause)) else met  # of several, what it began with
    if met is None:
        return None
    is_told = any(limit in str(met) for limit in (_LIMIT, _LIMIT_OF_ALL))
    if is_told and isinstance(met, (UserError, RunError)):
        return str(met)  # of another rank or process
    file = met.filename if isinstance(met, OSError) else None
    where = f" at {file}" if file else ""
    if os.strerror(errno.ENFILE) in str(met):
        return one_line(f"too many open files on this machine{where}: raise its {_LIMIT_OF_ALL}")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return one_line(
        f"too many open files{where}: a process may have {limit} here; raise the limit before the "
        f"start, as with {_LIMIT} 65536 or docker run --ulimit nofile=65536"
    )


def lost_peer(error: BaseException) -> str | None:
    """Return how the connection to another rank failed, if that is the cause of an error."""
    for cause in _causes(error):
        first_line = (str(cause).splitlines() or [""])[0]
        if isinstance(cause, RuntimeError) and _LOST_PEER.search(first_line):
            return "no connection to another rank, which has ended, hangs or is cut off: " + (
                one_line(_LOST_PEER.sub("", first_line))
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes; an error that ranks agree on may be its own cause.

    Contexts are no causes: an error of ours in a handler keeps its traceback.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__


def for_all_ranks(error: BaseException, rank: int) -> UserError | RunError | PeerError:
    """Return the error that the other ranks raise where this one meets `error`."""
    if (limit := open_files_limit(error)) is not None:
        return UserError(limit)
    if isinstance(error, (UserError, RunError, PeerError)):
        return error
    if is_storage_failure(error):
        return StorageError(describe(error))
    if is_memory_failure(error):
        return RunError(describe(error))
    return PeerError(f"rank {rank} failed: {describe(error)}")


def describe(error: BaseException) -> str:
    """Return a short one-line description of an exception."""
    if (limit := open_files_limit(error)) is not None:
        return limit
    if isinstance(error, (UserError, RunError, PeerError)):
        return str(error)
    if is_memory_failure(error):
        return _describe_memory(str(error))
    if isinstance(error, OSError) and error.strerror:
        return one_line(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    first_line = one_line((str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def type_and_message(error: Exception) -> str:
    """Return an exception of another library as one line, with all lines of its message."""
    return open_files_limit(error) or one_line(f"{type(error).__name__}: {error}")


def _describe_memory(text: str) -> str:
    """Return an allocator's text, without advice that is not about our flags."""
    asked = re.search(r"(?:tried|unable) to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    whose = "device" if "CUDA" in text or "CUBLAS" in text else "host"
    text = f"out of {whose} memory"
    text += "" if asked is None else f", where {asked[1]} were asked for"
    return text if free is None else f"{text} and {free[1]} were free"


@contextmanager
def reading(what: str, *, how: str = "read") -> Iterator[None]:
    """Turn an error of the system into a `UserError` around a call that reads a user's file.

    The error for too many open files is left as it is: no single file is at fault.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 text") from error
    except OSError as error:
        if open_files_limit(error) is not None:
            raise
        text = f"{what} cannot be {how}: {error.strerror or error}"
        if is_storage_failure(error):
            remedy = "; make room or write elsewhere" if how == "written" else ""
            raise OSError(error.errno, text + remedy) from error
        raise UserError(text) from error


def writing(what: str) -> AbstractContextManager[None]:
    """Turn an error of the system into a `UserError` around a call that writes a user's file."""
    return reading(what, how="written")


@contextmanager
def printing() -> Iterator[None]:
    """Name standard output in errors of the block, which prints to a pipe, disk or terminal.

    The error is a `BrokenPipeError` where the reader of a pipe has ended, as `head` does.
    """
    try:
        yield
    except OSError as error:
        number = errno.EPIPE if isinstance(error, BrokenPipeError) else errno.EIO
        text = f"standard output cannot be written: {error.strerror}"
        raise OSError(number, text) from error


@contextmanager
def about(prefix: str = "", suffix: str = "") -> Iterator[None]:
    """Put a field or a flag before the text of an error, and a remedy behind it."""
    try:
        yield
    except (UserError, StorageError) as error:
        raise type(error)(prefix + "; ".join(error.args) + suffix) from error


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Turn an `ImportError` of the block into a `UserError` with the text `what`."""
    try:
        yield
    except ImportError as error:
        raise UserError(what) from error


def printable(text: str) -> str:
    """Return the text with every character escaped that a terminal would act upon or hide.

    Names in files and flags may hold ANSI escapes, or marks that reverse the direction of text.
    Ends of lines and tabs are left: the layout of what is printed.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: str, longest: int = _MAX_LINE_CHARS) -> str:
    """Return the text as one printable line of at most `longest` characters, its middle cut out."""
    return _cut(printable(" ".join(text.split())), longest)


def _cut(line: str, longest: int) -> str:
    """Return the line, with its middle cut out if it has more than `longest` characters."""
    half = (longest - 5) // 2
    return line if len(line) <= longest else f"{line[:half]} ... {line[-half:]}"


def count_text(number: int, what: str) -> str:
    """Return the number and a noun, in the plural unless the number is 1."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def is_word(text: str) -> bool:
    """Return whether a command line and a file's name can have the text.

    It has no NUL and no half of a character of two; bytes that are no UTF-8 are allowed.
    """
    return re.search("[\0\ud800-\udc7f\udd00-\udfff]", text) is None


def shown(text: str) -> str:
    """Return a text as a terminal gets it: printable lines of at most `_MAX_SHOWN_CHARS`
    characters."""
    text = printable(text)
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return "\n".join(_cut(line, _MAX_SHOWN_CHARS) for line in text.split("\n"))
