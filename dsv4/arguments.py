"""The types of the command line's arguments: text in, value out, or one line that says what was expected. Imports nothing heavy."""

from __future__ import annotations

import argparse
import errno
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from .machines import GIB, Machine, assumed


class OneLineParser(argparse.ArgumentParser):
    """argparse, with an error of one line and no usage text before it."""

    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def whole(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number from `minimum` to `maximum`."""

    def parse(text):
        if not text.removeprefix("-").isdecimal() or len(text) > 20 or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"expected a whole number from {minimum} to {maximum}, found {text[:40]!r}")
        return int(text)

    return parse


def gibibytes(text: str) -> int:
    """Bytes of a number of GiB above 0, such as 40 or 0.5."""
    try:
        number = float(text) if len(text) <= 20 else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < 2**20:
        raise argparse.ArgumentTypeError(f"expected a number of GiB above 0, such as 40 or 0.5, found {text[:40]!r}")
    return math.ceil(number * GIB)  # never 0, which would be no bound


def token_ids(text: str) -> list[int]:
    """1,2,3."""
    return _numbers(text, 10, "token ids such as 0,17,4")


def layer_counts(text: str) -> tuple[int, ...]:
    """20,23: so many layers on each device, at least one."""
    counts = _numbers(text, 4, "layers for each device such as 20,23")
    if 0 in counts:
        raise argparse.ArgumentTypeError(f"expected at least one layer for each device, found {text[:40]!r}")
    return tuple(counts)


def _numbers(text, digits, expected):
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= digits for part in parts):
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text[:40]!r}")
    return [int(part) for part in parts]


def layer_range(text: str) -> tuple[int, int]:
    """A:B, the layers A to B - 1."""
    first, colon, last = text.partition(":")
    if len(text) > 20 or not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"expected A:B with A < B, the layers A to B - 1, found {text[:40]!r}")
    return int(first), int(last)


def machine(text: str) -> Machine:
    """8xB200, or 2x96."""
    try:
        return assumed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_file(p: argparse.ArgumentParser, flag: str, text: str) -> Path:
    """The file to write at the end, a link followed; ends the program now if it could not be written then."""
    name, path = text[:100], Path(os.path.realpath(text))
    if not os.path.basename(text):
        p.error(f"{flag}: expected a file name, found {name!r}")
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EEXIST, "is there and is not a regular file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        p.error(f"{flag}: {name} cannot be written: {error.strerror}: give a file name in a writable folder")
    return path
