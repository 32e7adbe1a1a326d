"""Start modules of this project as forks of a forked process, so that nothing is imported again."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from devices.processes.interpreter import module_command
from edge import ending

_START = module_command("")[:-1]
_MODULE = len(_START)  # the place of its name in such a command
_STREAMS, _NEW_SESSION = slice(3, 9), 14  # in what `_execute_child` takes behind the environment

_BEFORE: list[TextIO] = []  # streams of the process that forked this one, whose end would write what they hold


def fork_children(be_module: Callable[[list[str]], NoReturn]) -> None:
    """From now on fork a module `...child` that this process has imported, while it has no threads whose locks could
    stay locked. be_module: runs a module and its arguments, and ends."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        """As any other, but what is forked has the name of its module, and the command line of this process."""

        def _execute_child(  # type: ignore[override]
            self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
            *rest: Any,
        ) -> None:  # fmt: skip
            is_child = [*args[:_MODULE]] == _START and args[_MODULE].endswith("child") and args[_MODULE] in sys.modules
            if not is_child or cwd is not None or _has_threads():
                super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
                return
            streams = rest[_STREAMS]
            self.pid = os.fork()
            if not self.pid:
                _be_alone((streams[0], streams[3], streams[5]), pass_fds, env, is_leader=rest[_NEW_SESSION])
                be_module([*args[_MODULE:]])
            self._child_created = True
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    subprocess.Popen = Popen  # type: ignore[misc]


def _has_threads() -> bool:
    """Return whether there are others than the one that waits for signals, and locks nothing."""
    waiting = [thread for thread in threading.enumerate() if thread.name == "signals"]
    return len(os.listdir("/proc/self/task")) > 1 + len(waiting)


def _be_alone(streams: tuple[int, ...], descriptors: Any, env: Any, *, is_leader: bool) -> None:
    """Have nothing of the process that forked this one but these streams and descriptors, as behind an exec."""
    gc.freeze()  # so that nothing of it is collected here, and closes what has its number by then
    _BEFORE.extend((sys.stdin, sys.stdout, sys.stderr))
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    ending._ended_by_signals = False
    sys.unraisablehook = sys.__unraisablehook__
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if is_leader:
        os.setsid()
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    for place, descriptor in enumerate(streams):
        if descriptor != -1:
            os.dup2(descriptor, place)
    close_all_but(*descriptors)


def close_all_but(*open_descriptors: int) -> None:
    """Close all descriptors but the standard streams and these."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in open_descriptors:
            with suppress(OSError):  # of the folder that was listed
                os.close(descriptor)
