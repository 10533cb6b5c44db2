"""Errors of checkpoints, each with a one-line message for the user."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message is one line for the user."""


class DamagedError(CheckpointError):
    """A checkpoint is incomplete or damaged; an older one may be complete."""


def describe(error: BaseException) -> str:
    """A short one-line description of an exception."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
