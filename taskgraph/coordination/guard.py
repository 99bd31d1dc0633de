"""Runs one command that must not outlive its parent process, even if the parent dies of SIGKILL.

    python -I -S guard.py [--remove DIR]... [--log FILE] [--files N] --parent PID -- COMMAND ARGUMENT...

The parent has the write end of the guard's standard input. When that closes, or the guard gets SIGTERM, or the parent
is gone, the guard sends the command SIGTERM and, two seconds later, SIGKILL. The command has its own process group, so
that its children get the signals, too, and Ctrl-C on the terminal does not. Then the guard removes the directories.

The first line of the guard's standard output is the command's process id. The guard ends with the command's exit code
(128 + n for signal n). If the command ended by itself, the end of its log goes to standard error, since the log may be
removed.

A long log is cut to its end: etcd logs 1 KB for each slow request, for days.

It uses only the standard library, and not the package, so that it starts in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time

KILL_AFTER_S = 2.0
#: The pipe closes when the parent dies, unless a process that the parent forked still has it open.
PARENT_CHECK_S = 1.0
#: etcd's log of a failure has two stacks of 2 KiB each.
LOG_TAIL_BYTES = 16384
#: A longer log is cut to its end. It is checked as often as the parent.
LOG_LIMIT_BYTES, LOG_CUT_BYTES = 4 << 20, 1 << 20
LOG_CUT = b"(what was written before is left out)\n"
PR_SET_PDEATHSIG = 1


def _die_with_guard(guard: int) -> None:
    """Makes Linux kill this child process when its guard dies. Called in the child before it runs the command."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:
        os._exit(1)


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to the command's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """True if the command has ended. It is not reaped, so that its process id and group stay reserved."""
    if not hasattr(os, "waitid"):  # elsewhere than on Linux
        return child.poll() is not None
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_for_end(child: subprocess.Popen[bytes], parent: int, wake: int, log: str | None) -> bool:
    """Waits until the command has ended (returns True) or must be ended (returns False)."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(wake, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll(PARENT_CHECK_S * 1000):
            if descriptor == 0 and not os.read(0, 4096):
                return False
            if descriptor == wake and signal.SIGTERM in os.read(wake, 4096):
                return False
        if _has_ended(child):
            return True
        if os.getppid() != parent:
            return False
        if log is not None:
            _cut_log(log)


def _end_command(child: subprocess.Popen[bytes], wake: int) -> None:
    """Ends the command by SIGTERM, and after two seconds by SIGKILL. In any case kills the rest of its group."""
    if not _has_ended(child):
        _signal_group(child, signal.SIGTERM)
        until = time.monotonic() + KILL_AFTER_S
        while not _has_ended(child) and (left := until - time.monotonic()) > 0:
            if select.select([wake], [], [], left)[0]:
                os.read(wake, 4096)
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _cut_log(path: str) -> None:
    """Cuts a long log to its last lines, while etcd appends to it.

    The last lines are written over the beginning before the cut, so that the log is never empty: otherwise a line that
    is appended meanwhile would come first. A line appended between the last read and the cut is lost.
    """
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as log:  # not to append
        if (size := os.fstat(log.fileno()).st_size) <= LOG_LIMIT_BYTES:
            return
        begin = size - LOG_CUT_BYTES
        end = os.pread(log.fileno(), size, begin)  # and lines appended since
        kept = LOG_CUT + end.partition(b"\n")[2]
        os.pwrite(log.fileno(), kept, 0)
        since = os.pread(log.fileno(), size, begin + len(end))
        os.pwrite(log.fileno(), since, len(kept))
        os.ftruncate(log.fileno(), len(kept) + len(since))


def _show_log(path: str) -> None:
    """Writes the end of a log to standard error."""
    with contextlib.suppress(OSError), open(path, "rb") as log:
        if (before := os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES) > 0:
            log.seek(before - 1)
            log.readline()  # begin with a whole line
        os.write(2, log.read())


def main() -> int:
    """Runs the command until it ends, our parent ends, or SIGTERM comes; returns its exit code."""
    parser = argparse.ArgumentParser(description="Run a command that ends when standard input does.")
    parser.add_argument("--remove", action="append", default=[], help="directory to remove at the end")
    parser.add_argument("--log", help="file for the command's output")
    parser.add_argument("--files", type=int, help="limit of open files for the command, as far as the system allows")
    parser.add_argument("--parent", type=int, required=True, help="process id of our parent")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()

    # A pipe that signals write to, so that one poll sees the parent, the command and SIGTERM.
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    if options.files is not None:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (options.files, hard))
    child = None
    try:
        with open(options.log or os.devnull, "a+b", buffering=0) as log:
            try:
                child = subprocess.Popen(
                    options.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                    preexec_fn=functools.partial(_die_with_guard, os.getpid()) if sys.platform == "linux" else None,
                )
            except OSError as error:
                os.write(2, f"cannot start {options.command[0]}: {error.strerror}\n".encode())
                return 127
            os.write(1, f"{child.pid}\n".encode())
            by_itself = _wait_for_end(child, options.parent, wake, options.log)
        _end_command(child, wake)
        if by_itself and options.log:
            _show_log(options.log)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode
    finally:
        if child is not None and child.returncode is None:
            _end_command(child, wake)
        for directory in options.remove:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
