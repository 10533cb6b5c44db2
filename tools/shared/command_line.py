"""Flag parsing for tools that start without torch: a mistake is one line and status 2."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the name of the program."""

    def error(self, message: str) -> NoReturn:
        program = self.prog.split()[0]  # without the subcommand, where there is one
        self.exit(2, f"{program}: error: {' '.join(message.split())}\n")
