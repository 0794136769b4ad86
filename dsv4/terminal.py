"""What a person at a terminal meets: standard input, Ctrl-C, standard error and its bars. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

from .errors import UserError


def read_text(name: str, flag: str) -> str:
    """A file's text, or standard input's for -, as strict UTF-8."""
    if name == "-" and sys.stdin is None:
        raise UserError(f"{flag}: expected a prompt on standard input, found it closed")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(f"{flag}: {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: expected UTF-8, found byte 0x{data[error.start]:02x} at offset {error.start} of {name}") from None


class Interrupt:
    """Within a with-block, Ctrl-C once asks to stop: whoever works looks at `asked`, or calls `check`. Twice stops at once."""

    class Stop(Exception):
        """Work was given up because the user asked."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self, *_):
        if self.asked:
            raise self.Stop


def progress_bar(total: int, what: str, unit: str, hidden: bool = False):
    """A bar on standard error, drawn only on a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=True if hidden else None, leave=False, file=sys.stderr)


def say(text: str, end: str = "\n") -> None:
    """Writes to standard error. Nobody reading it, or a full disk behind it, must not cost the answer."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + end)
        sys.stderr.flush()
