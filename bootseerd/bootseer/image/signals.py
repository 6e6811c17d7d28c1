"""Signals around a command that we start for somebody: none is lost, none is delivered twice, none leaves a mess.

:class:`Signals` takes over. Before the command runs, a signal that means "end" raises
:class:`Interrupted` where that is safe (:meth:`Signals.interruptible`, :meth:`Signals.check`) and is remembered
everywhere else; while it runs, signals are passed on; after it has ended they are ignored, so that cleaning up is
never cut short.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

# The first four mean "end"; jobs give the other two a meaning of their own, such as "write a checkpoint".
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_SI_KERNEL = 0x80  # siginfo.h: not sent by a process, so by the terminal, and to the whole foreground group
_INSISTED = 3  # a command that ignores this many requests to end is killed
_POLL_S = 1.0  # should a SIGCHLD get lost


class Interrupted(BaseException):
    """A signal asked us to end before the command had started. Like KeyboardInterrupt, no Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Signals:
    """See the module. Only in the main thread, one at a time."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._raising = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.take_over()
        return self

    def take_over(self) -> None:
        """Enter for good: a process that is about to end must not be killed by a signal in its last moment."""
        for number in _FORWARDED:
            # Ignored ones stay so: nohup and background jobs of a shell rely on it.
            if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                self._previous[number] = signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """For the end of a process: the interpreter would undo everything else before it is gone."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _frame: object) -> None:
        self._pending.append(number)
        if self._raising:
            self.check()

    def check(self) -> None:
        """Raise Interrupted if a signal has asked us to end."""
        for number in self._pending:
            if number in _ENDING:
                self._raising = False
                self._pending.clear()
                raise Interrupted(number)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block, a signal interrupts at once. Only for code that can be left anywhere."""
        self._raising = True
        try:
            self.check()
            yield
        finally:
            self._raising = False

    def wait(self, pid: int, poll: Callable[[], int | None], kill: Callable[[], object]) -> int:
        """Wait for a child, passing signals on to it; returns what ``poll`` returns.

        What the terminal sends reaches the child without us. ``kill`` ends a command that ignores repeated
        requests, as the first process of a pid namespace does with every signal that it does not handle.
        """
        watched = {*self._previous, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        insisted = 0
        try:
            waiting = self._pending[:]
            self._pending.clear()
            while True:
                for number in waiting:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                waiting = []
                result = poll()
                if result is not None:
                    return result
                info = signal.sigtimedwait(watched, _POLL_S)
                if info is None or info.si_signo == signal.SIGCHLD:
                    continue
                if info.si_signo in _ENDING:
                    insisted += 1
                if insisted >= _INSISTED:
                    kill()
                elif info.si_code != _SI_KERNEL:
                    waiting = [info.si_signo]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
