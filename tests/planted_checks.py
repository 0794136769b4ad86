"""Checks that pass, fail, die and hang, for tests/test_first_light.py. Child processes import this file, so it imports little."""

import os
import signal
import subprocess
import sys
import time

from dsv4.errors import KernelError


def found(what, kernel=None, verdict="pass", why="", **numbers) -> dict:
    """A row as those of helpers/light_checks.py."""
    return {"shows": "right", "what": what, "kernel": kernel, "verdict": verdict, "why": why} | numbers


def good(kernel="good"):
    print("all is well")
    yield found("a product", kernel, relative=1e-3, at="decode")
    yield found("another", kernel, relative=float("nan"))


def wrong():
    yield found("twice", "wrong")
    yield found("a | b\nc", "wrong", "fail", "cosine 0.5", relative=0.5)


def raises():
    yield found("seen", "first of raises")
    print("before the end")
    raise ValueError("no such thing\nin two lines")


def names_its_kernel():
    yield from ()
    raise KernelError("culprit: expected the kernel to end, found an illegal access: --backend torch does without kernels")


def dies(how):
    yield found("seen", "before death")
    print("these are\nthe last words", flush=True)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(7)


def hangs(note):
    """With a process of its own, which is to end too."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(note, "w") as file:
        file.write(str(other.pid))
    print("waiting", flush=True)
    time.sleep(600)
    yield


def settings():
    yield found("environment", sync=os.environ.get("DSV4_SYNC", "unset"), process=os.getpid())
