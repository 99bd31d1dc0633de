"""The command line: `taskgraph ...`, `python -m taskgraph ...`, and `tg.main(job_function)` in a driver.

Exit codes: 0 success; 1 the job failed; 2 the command or the driver is wrong; 3 etcd or a node cannot be reached; 130
interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from taskgraph.commands.arguments import COMMANDS, USAGE, parser
from taskgraph.errors import (
    CoordinationError,
    JobCancelled,
    JobFailed,
    TaskGraphError,
    TransportError,
    UnknownJob,
    no_process_text,
    no_thread_text,
)
from taskgraph.system.environment import set_thread_env
from taskgraph.system.signals import obey_sigterm, stop_ignoring_children
from taskgraph.system.streams import drop_unwritten, prepare_streams

if TYPE_CHECKING:
    from taskgraph.jobs import JobFunction

__all__ = ["driver_main", "main", "report_threads"]

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130
_DRIVER_COMMANDS = ("run", "submit", "launch")
_THREADS_S = 2.0
"""How long the process waits for threads before it says so."""


_LEAST_FILES = 64
"""With fewer open files a command would fail anywhere, with a traceback."""
_MORE_FILES = "`ulimit -n 1024` allows more"

_COMMANDS = {name: where for group in COMMANDS.values() for name, where in group.items()}


def _load_command(name: str) -> Callable[..., Any]:
    """Imports the function of a command, and returns it."""
    module, _, function = _COMMANDS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"taskgraph.commands.{module}"), function)
    return found


def main(arguments: Sequence[str] | None = None, function: JobFunction[...] | None = None) -> int:
    """Runs one command; returns its exit code.

    Args:
        arguments: the words of the command line; None: those of this process.
        function: the job function of a driver that calls `tg.main`; None: the command line names the driver.
    """
    prepare_streams()  # first, so that no other file becomes a standard stream
    stop_ignoring_children()
    # Before anything imports numpy: a `node` typed by hand computes like one that was launched.
    set_thread_env(1)
    # Otherwise gRPC prints a line for each bad frame or failed handshake. Our errors say the same.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        made = parser(arguments, driver=function)
        options = made.parse_args(arguments)
        if options.command is None:
            made.print_help(sys.stderr)
            return USAGE
        if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _LEAST_FILES and files != resource.RLIM_INFINITY:
            _print_error(f"only {files} files may be open at a time here: {_MORE_FILES}")
            return FAILED
        command = _load_command(options.command)
        code = command(options, function) if options.command in _DRIVER_COMMANDS else command(options)
        if not isinstance(code, int):
            import uvloop

            code = uvloop.run(code)
        sys.stdout.flush()  # so that a full disk is an error of this command
        return int(code)
    except JobFailed as error:
        what = "the job was ended" if isinstance(error, JobCancelled) else "job failed"
        _print_error(f"{what}: {error}", error)
        return FAILED
    except (CoordinationError, TransportError, UnknownJob) as error:
        _print_error(str(error), error)
        if isinstance(error, CoordinationError):
            from taskgraph.launch.access import advice

            if text := advice(error):
                print(text, file=sys.stderr)
        return UNREACHABLE
    except TaskGraphError as error:
        _print_error(str(error), error)
        return USAGE
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        drop_unwritten()  # the reader of our output has closed it
        return 0
    except (OSError, RuntimeError) as error:
        text = no_thread_text(error) if isinstance(error, RuntimeError) else _host_error_text(error)
        if not text:
            raise
        _print_error(text, error)
        return FAILED
    finally:
        if not getattr(sys.stdout, "closed", False):  # a driver may have replaced standard output
            drop_unwritten()  # else Python fails to flush it at exit, with another exit code


def _host_error_text(error: OSError) -> str:
    """Returns the message for an error of the host or the working directory; "" for any other error."""
    if error.errno == errno.ENOENT and "temporary directory" in (error.strerror or ""):  # what `tempfile` says
        return f"{error.strerror}: set TMPDIR to a directory that can be written"
    if error.errno == errno.ENOENT and error.filename is None and _is_directory_removed():  # what `os.getcwd` says
        return "the working directory was removed: `cd` to one that is there"
    from taskgraph.system.files import OF_THE_HOST

    if (text := no_process_text(error)) or error.errno not in OF_THE_HOST:
        return text
    where = "standard output" if drop_unwritten() else error.filename
    text = f"{where}: {error.strerror}" if where else str(error)
    return f"{text}: {_MORE_FILES}" if error.errno == errno.EMFILE else text


def _is_directory_removed() -> bool:
    """Returns True if the working directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _print_error(text: str, error: Exception | None = None) -> None:
    """Prints a text, and below it the notes of an error, to standard error."""
    from taskgraph.observe.screen import say

    for line in (text, *getattr(error, "__notes__", ())):
        say(line)


def report_threads() -> None:
    """Starts a timer that prints for which threads of the driver Python still waits. The main thread calls this last.

    Python waits for threads that are no daemons, and says nothing.
    """
    if all(thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        return
    teller = threading.Timer(_THREADS_S, _print_threads)  # threads of a pool end by themselves
    teller.daemon = True
    with contextlib.suppress(RuntimeError):  # without a thread there is no report
        teller.start()


def _print_threads() -> None:
    """Prints which threads keep the process alive, if the main thread has ended."""
    main_thread = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main_thread]
    if names and not main_thread.is_alive():
        text = f"done; waiting for threads that the driver started: {', '.join(names)}"
        _print_error(f"{text} (Ctrl-C ends them; Python does not wait for threads with daemon=True)")


def driver_main(function: JobFunction[...]) -> None:
    """Runs the command line of a driver, then exits: `tg.main(fit)` at its end. Without a command it runs the job.

    Raises:
        JobError: the argument is no job function, the driver is being imported, or an event loop runs.
    """
    from taskgraph.driver.loading import check_no_loop, check_not_importing
    from taskgraph.jobs import check_job_function  # only a driver needs this

    check_job_function(function)
    check_not_importing(function.__name__)  # else it would parse the arguments of a node process
    check_no_loop("tg.main", f"`await tg.arun({function.__name__}(...))`")
    obey_sigterm()
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] not in _COMMANDS and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["run", *arguments]
    code = main(arguments, function)
    report_threads()
    sys.exit(code)
