"""Objects of a store as paths, by URLs such as s3://bucket/key: read by ranges, written whole."""

# A store has no folders and no rename: a folder is there if an object's key begins with its path,
# and a new object is seen as a whole once it is written. Calls go through fsspec's packages, which
# find credentials in their own ways; none is in a URL, and none is printed.

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path, PosixPath
from typing import Any, NoReturn, TypeVar

from paro.errors import UserError, one_line
from paro.files.waits import LimitedWait

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # by the scheme of a URL

_URL = re.compile(rf"({'|'.join(PACKAGES)})://")
_LONGEST_PAUSE = 5.0  # seconds between two attempts
_CONNECT_SECONDS = 10
_SILENT_SECONDS = 15


def _socket(address: Any) -> socket.socket:
    """Make a socket that the system closes once the other end has taken nothing for a while.

    Clients limit only how long they wait to read: an upload might never end.
    """
    made = socket.socket(*address[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)
    return made


# Errors of a store that is down, slow or cut off; those of libraries are known by name alone.
_TRANSIENT = re.compile(
    "Connection|Timeout|Incomplete|HTTPClient|Payload|ServerError|HttpError|ResponseParser"
    "|ServiceRe(?:sponse|quest)|Checksum|Transport"
)
# A HEAD with a token of S3 that has expired is a bad request, without a reason.
_CREDENTIALS = re.compile(
    "Auth|Credential|Refresh|Token|Permission|Forbidden|Errno 22] Bad Request"
)
_TRANSIENT_ERRNOS = (
    *(errno.EBUSY, errno.EREMOTEIO, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE),
    *(errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH),
)
_timeout: ContextVar[float | None] = ContextVar("store_timeout", default=None)  # seconds

T = TypeVar("T")


def is_url(path: str | Path) -> bool:
    """Return whether a path or a text is the URL of an object."""
    return _URL.match(str(path)) is not None


def path_of(text: str | Path) -> Path:
    """Return the path of a file, or of an object if the text is a URL of a known scheme."""
    if isinstance(text, Path) or not is_url(text):
        return Path(text) if isinstance(text, str) else text
    scheme, _, path = text.partition("://")
    bucket = path.partition("/")[0]
    if not bucket or "@" in bucket:
        raise UserError(
            f"a URL is {scheme}://BUCKET/KEY, with no credentials: {PACKAGES[scheme]} takes them "
            "from the environment or from its own files"
        )
    if find_spec(PACKAGES[scheme]) is None:
        raise UserError(f"{text} needs the package {PACKAGES[scheme]}: pip install it")
    return StorePath(text)


@contextmanager
def store_timeout(seconds: float) -> Iterator[None]:
    """Limit how long calls of the block wait for a store, in this thread."""
    token = _timeout.set(seconds)
    try:
        yield
    finally:
        _timeout.reset(token)


class StorePath(PosixPath):
    """The path of an object, whose text is its URL; refuses operations that a store lacks."""

    _listed: dict[str, Any] | None = None  # the metadata of the object in a listing

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def resolve(self, strict: bool = False) -> StorePath:
        return self

    absolute = resolve

    def info(self) -> dict[str, Any]:
        """Return the store's metadata of the object: its size, and its version under other keys."""
        return self._listed or self._call("info")

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        info = self.info()
        mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        return os.stat_result((mode, 0, 0, 1, 0, 0, info.get("size") or 0, 0, 0, 0))

    def iterdir(self) -> Generator[StorePath, None, None]:
        """Yield the entries directly under the path; `FileNotFoundError` if there are none."""
        for entry in self._call("ls", detail=True):
            child = self / entry["name"].rstrip("/").rpartition("/")[2]
            if child != self and child.name:
                child._listed = entry
                yield child

    def glob(self, pattern: str) -> Generator[StorePath, None, None]:
        """Yield the entries directly under the path whose names match a pattern."""
        yield from (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a store has no folders."""

    def read_bytes(self) -> bytes:
        return bytes(self._call("cat_file"))

    def read_range(self, begin: int, stop: int) -> bytes:
        """Return the bytes from `begin` to before `stop`, all of which the object has."""

        def attempt(file_system: Any) -> bytes:
            content = bytes(file_system.cat_file(str(self), start=begin, end=stop))
            if len(content) != stop - begin:
                raise OSError(errno.EIO, f"{len(content)} bytes came of {stop - begin}")
            return content

        return self._retried(attempt)

    def write_bytes(self, data: Any) -> int:
        self._call("pipe_file", bytes(data))
        return len(data)

    def create(self, content: bytes) -> bool:
        """Write an object that does not exist yet; return False if one of other content does."""
        try:
            self._call("pipe_file", content, mode="create")
        except FileExistsError:
            return self.read_bytes() == content  # an answer may be lost: the object is ours
        return True

    def upload(self, source: Path) -> None:
        """Write a local file's content, a large one in parts at once."""
        self._retried(lambda file_system: file_system.put_file(str(source), str(self)))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove all objects under the path."""
        for name in self._call("find"):
            key = name.removeprefix(f"{self.parts[0]}//")
            StorePath(self.parts[0], key).unlink(missing_ok=True)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{self} is in an object store, and a file is needed here")

    open = rename = replace = touch = rglob = _refuse

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the store's file system about this object."""
        return self._retried(
            lambda file_system: getattr(file_system, method)(str(self), *args, **options)
        )

    def _retried(self, attempt: Callable[[Any], T]) -> T:
        """Return the outcome of an attempt, which is made again while the store does not answer.

        Errors are of the system, about this URL; `TimeoutError` past the limit.
        """
        # The last attempt ends before a watchdog would end the process.
        limit = 0.8 * LimitedWait.limit_seconds if _timeout.get() is None else _timeout.get()
        wait, pause = LimitedWait(f"the object store of {self}", limit), 0.1
        while True:
            try:
                return attempt(_file_system(self.parts[0].removesuffix(":"), os.getpid()))
            except UserError:
                raise
            except Exception as error:  # of the libraries' own classes
                why = f": {type(error).__name__}: {one_line(str(error), 300)}"
                if (explained := _explained(error, why)) is not None:
                    raise OSError(*explained, str(self)) from error
            wait.check(why)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _explained(error: Exception, why: str) -> tuple[int, str] | None:
    """Return the number and the text of the system's error; None if a later call may succeed."""
    # Errors of Azure's and Google's libraries have the status of HTTP.
    number = str(getattr(error, "status_code", None) or getattr(error, "code", None))
    status = int(number) if number.isdecimal() else None
    if isinstance(error, OSError) and error.errno is not None:
        is_transient = error.errno in _TRANSIENT_ERRNOS
    elif status is not None:
        is_transient = status in (408, 429) or status >= 500
    else:
        is_transient = any(_TRANSIENT.search(kind.__name__) for kind in type(error).__mro__)
    if is_transient:
        return None
    if isinstance(error, FileNotFoundError) or status == 404:
        return errno.ENOENT, os.strerror(errno.ENOENT)
    if isinstance(error, FileExistsError):
        return errno.EEXIST, os.strerror(errno.EEXIST)
    if status in (401, 403) or _CREDENTIALS.search(f"{type(error).__name__} {error}"):
        return errno.EACCES, f"the store refuses the credentials (is a token old?){why}"
    return errno.EACCES, f"the store refuses the request{why}"


@cache
def _file_system(scheme: str, process: int) -> Any:
    """Return fsspec's file system of a scheme, one in each process: none survives a fork.

    It breaks off a connection that answers nothing, and makes no attempt again by itself.
    """
    import fsspec
    from fsspec.asyn import sync

    # Libraries would print a traceback of each error that they raise.
    for name in ("asyncio", "azure", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        why = one_line(str(error.__cause__ or error), 300)
        raise UserError(
            f"{scheme}:// needs {PACKAGES[scheme]}, whose import fails: {why}"
        ) from error
    # Another process may write what a listing that is kept does not have.
    make = partial(kind, use_listings_cache=False, skip_instance_cache=True)
    if scheme == "s3":
        config = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _SILENT_SECONDS,
            "connector_args": {"socket_factory": _socket},
            "retries": {"total_max_attempts": 1},  # else each call lasts five times its limit
        }
        store = make(config_kwargs=config, max_concurrency=4)
        store.retries = 2  # for a part of an upload; then the whole call is made again
    elif scheme == "gs":
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS)
        store = make(requests_timeout=timeout)
        store._request = partial(kind._request.__wrapped__, store)  # else each call is six
        sync(store.loop, store._set_session)
        store.session.connector._socket_factory = _socket
    else:  # az, whose options would be limits of reads and writes alone
        store = make()
        config = store.service_client._config
        config.retry_policy.total_retries = 0  # else pauses take a minute
        transport, limits = config.transport, config.transport.connection_config
        limits.timeout, limits.read_timeout = _CONNECT_SECONDS, _SILENT_SECONDS
        sync(store.loop, transport.open)
        transport.session.connector._socket_factory = _socket
    return store
