"""Work in child processes, so that what takes a process down (an illegal access ends its CUDA context, a hang its patience) costs one task
and no other. Tasks of a run share a child as long as it lives; behind a task that ended it, the next ones get a new one."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

LAST_LINES = 12  # of what a child said, in the report of its death
START_S = 180  # for a child to begin: torch alone took 20 s from a cold disk


@dataclass(frozen=True)
class Task:
    """function(**arguments) gives rows (dicts that pickle), one after the other. A module's function, as a child imports it by name."""

    name: str
    function: Callable[..., Iterable[dict]]
    arguments: dict = field(default_factory=dict)
    limit_s: float = 120.0


@dataclass
class Outcome:
    """What became of a task: its rows, also those it gave before it failed; `failure`: None, or one line and below it the last lines."""

    task: Task
    rows: list[dict]
    seconds: float
    failure: str | None = None
    cut: bool = False  # by the run's deadline, not by its own limit


def run(tasks: Iterable[Task], environment: dict[str, str] | None = None, deadline: float = float("inf")) -> Iterator[Outcome]:
    """Each task once, in order. `environment`: variables of the children beside ours; `deadline`: of time.monotonic(), for all of them: a
    task is given no longer than what is left, and not begun behind it."""
    left = list(tasks)
    while left:
        if time.monotonic() >= deadline:
            yield Outcome(left.pop(0), [], 0.0, "no time was left for it", cut=True)
            continue
        with _Child(left, environment or {}) as child:
            while left and time.monotonic() < deadline:
                outcome = child.outcome(left[0], deadline)
                left.pop(0)
                yield outcome
                if child.gone:
                    break


class _Child:
    """A process that works on these tasks, in a session of its own, so that what it starts (compilers) ends with it."""

    def __init__(self, tasks: list[Task], environment: dict[str, str]):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile(prefix="first-light-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
        work = [(task.function, task.arguments) for task in tasks]  # and nothing that takes more imports than they do
        self.process = context.Process(target=_work, args=(work, theirs, str(self.log)), daemon=False)
        with _environment(environment):
            self.process.start()
        theirs.close()
        self.gone = False

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_) -> None:
        self._kill()
        self.connection.close()
        self.log.unlink(missing_ok=True)

    def outcome(self, task: Task, deadline: float) -> Outcome:
        """Of the task that the child is at, when it has ended or its time is over."""
        start, rows, begun, said = time.monotonic(), [], False, 0
        end = min(start + START_S, deadline)
        while True:
            if not self.connection.poll(max(0.0, end - time.monotonic())):
                self._kill()
                if end >= deadline:
                    return Outcome(task, rows, time.monotonic() - start, "cut off: no time was left for it", cut=True)
                limit = f"{task.limit_s:g} s" if begun else f"the {START_S} s that a child has to start"
                return Outcome(task, rows, time.monotonic() - start, self._words(f"hung: not done within {limit}, killed", said))
            try:
                kind, value = self.connection.recv()
            except (EOFError, OSError):
                self._kill(wait_s=20)
                return Outcome(task, rows, time.monotonic() - start, self._words(f"died: {self._how()}", said))
            if kind == "begin":
                start, begun, said = time.monotonic(), True, value
                end = min(start + task.limit_s, deadline)
            elif kind == "row":
                rows.append(value)
            else:
                failure, last, until = value
                if last:
                    self._kill(wait_s=5)
                return Outcome(task, rows, time.monotonic() - start, failure and self._words(failure, said, until))

    def _how(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"

    def _words(self, line: str, said: int, until: int | None = None) -> str:
        """The line, and the last ones of what the child has written of this task, which is at these bytes of its log."""
        text = self.log.read_bytes()[said:until].decode(errors="replace")
        return "\n".join([line, *[part.rstrip() for part in text.splitlines() if part.strip()][-LAST_LINES:]])

    def _kill(self, wait_s: float = 0) -> None:
        """Ends it and what it has started, after so long for an end of its own."""
        if self.gone:
            return
        self.gone = True
        self.process.join(wait_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its session; there is none if it did not come as far
        if self.process.is_alive():
            self.process.kill()
        self.process.join(20)  # one that waits for a stuck GPU may stay: nobody waits for it


@contextlib.contextmanager
def _environment(variables: dict[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _work(tasks: list[tuple[Callable, dict]], connection, log: str) -> None:
    """The child: sends ("begin", size of its log), ("row", row).., ("end", (failure or None, whether it can do no more, size)) a task."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    for function, arguments in tasks:
        connection.send(("begin", os.fstat(output).st_size))
        failure = None
        try:
            for row in function(**arguments):
                connection.send(("row", row))
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        fault = _settle()  # kernels that are still running may fault
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(("end", (failure or fault, fault is not None, os.fstat(output).st_size)))
        if fault is not None:
            os._exit(1)  # the CUDA context is gone: nothing more can be done here, not even an orderly end
    connection.close()


def _settle() -> str | None:
    """Waits for the GPU and gives unused memory back -> the fault that it reports, if any."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as fault:
        print(fault, file=sys.stderr)
        return f"the GPU faulted: {str(fault).splitlines()[0]}"
    return None
