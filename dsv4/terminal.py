"""What a person at a terminal meets: Ctrl-C, and bars on standard error. Imports nothing heavy."""

from __future__ import annotations

import signal
import sys


class Interrupt:
    """Ctrl-C once asks to stop: whoever works looks at `asked`, or calls `check`. Twice stops at once."""

    class Stop(Exception):
        """Work was given up because the user asked."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)

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
