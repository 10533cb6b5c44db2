"""argparse with flags that take what a user means: no path is empty, and `--` is no value."""

from __future__ import annotations

import os
from argparse import Action, ArgumentError, ArgumentParser
from pathlib import Path
from typing import Any

# How --help calls the values that are files and folders.
PATHS = ("FILE", "DIR", "PATH", "PREFIX", "SOURCE")
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255  # of Linux


class FlagParser(ArgumentParser):
    """Refuses a path that is empty, or so long that even a look for it fails, and `--flag=--`.

    An empty path is what a shell makes of a variable that is not set.
    """

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:
            raise ArgumentError(action, "expected a value, and -- is none")  # argparse removes it
        if action.metavar in PATHS or action.type is Path:
            for path in arg_strings:
                if not path:
                    raise ArgumentError(action, "the path is empty")
                if _is_too_long(os.fsencode(path)):
                    raise ArgumentError(action, f"too long: {path}")
        return super()._get_values(action, arg_strings)


def _is_too_long(path: bytes) -> bool:
    return len(path) > _MAX_PATH_BYTES or max(map(len, path.split(b"/"))) > _MAX_NAME_BYTES
