"""Flag parsing and exit status of tools that start without torch: an error is one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from paro.errors import (
    RunError,
    UserError,
    describe,
    is_memory_failure,
    is_storage_failure,
    one_line,
)
from paro.report.log import print_line


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the name of the program."""

    def error(self, message: str) -> NoReturn:
        program = self.prog.split()[0]  # without the subcommand, where there is one
        self.exit(2, f"{program}: error: {one_line(message)}\n")


def status_of(name: str, run: Callable[[], int | None]) -> int:
    """What `run` returns, or 2 after a user's mistake and 1 if the machine fails, in one line."""
    try:
        return run() or 0
    except UserError as error:
        print_line(f"{name}: error: {error}", stream=sys.stderr)
        return 2
    except Exception as error:
        known = isinstance(error, RunError) or is_storage_failure(error) or is_memory_failure(error)
        if not known:
            raise
        print_line(f"{name}: error: {describe(error)}", stream=sys.stderr)
        return 1
