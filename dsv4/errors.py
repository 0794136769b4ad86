"""The errors a user can cause, each with the exit code the command line promises. Their text is one line: the thing,
what was expected, what was found, what to do."""

from __future__ import annotations

import sys


class UserError(Exception):
    """A bad argument, prompt or message."""

    exit_code = 2


class KernelError(UserError):
    """A kernel that could not be launched, or that the GPU stopped."""

    exit_code = 1


class CheckpointError(UserError):
    """Anything wrong with the checkpoint folder."""

    exit_code = 3


class DoesNotFit(UserError):
    """The plan needs more memory than there is."""

    exit_code = 4


def in_words(error: UserError | ModuleNotFoundError) -> str:
    """One line: an error's own, or which package is missing. A module of ours that is not found is a mistake and is raised again."""
    if isinstance(error, UserError):
        return str(error)
    if (error.name or "").partition(".")[0] in ("dsv4", "encoding", ""):
        raise error
    return f"expected the Python package {error.name}, found none in {sys.executable}: make demo, or pip install -e ."
