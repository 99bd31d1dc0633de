"""The command line: `taskgraph ...`, `python -m taskgraph ...`, and `tg.main(job_function)` in a driver.

Exit codes: 0 well; 1 the job failed; 2 the command or the driver is wrong; 3 etcd or a node cannot be reached; 130
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
    no_process,
    no_thread,
)
from taskgraph.system.environment import set_thread_env
from taskgraph.system.signals import hear_of_children, obey_sigterm
from taskgraph.system.streams import drop_unwritten, make_good

if TYPE_CHECKING:
    from taskgraph.jobs import JobFunction

__all__ = ["driver_main", "main", "tell_of_threads"]

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130
_OF_DRIVERS = ("run", "submit", "launch")
_THREADS_S = 2.0
"""Who waits longer for threads to end is told of it."""


_LEAST_FILES = 64
"""A command needs some, and with fewer it fails wherever it happens to be."""
_MORE_FILES = "`ulimit -n 1024` allows more"

_COMMANDS = {name: where for group in COMMANDS.values() for name, where in group.items()}


def _command(name: str) -> Callable[..., Any]:
    module, _, function = _COMMANDS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"taskgraph.commands.{module}"), function)
    return found


def main(arguments: Sequence[str] | None = None, function: JobFunction[...] | None = None) -> int:
    """Runs one command; returns its exit code."""
    make_good()  # first of all: nothing may take the place of a standard stream
    hear_of_children()
    # Before anything imports numpy: a `node` typed by hand computes like one that was launched.
    set_thread_env(1)
    # Else whoever connects to a node has gRPC write a line for each frame that it does not like, and every failed
    # handshake is one, too. What it comes to is said in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        made = parser(driver=function)
        options = made.parse_args(arguments)
        if options.command is None:
            made.print_help(sys.stderr)
            return USAGE
        if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _LEAST_FILES and files != resource.RLIM_INFINITY:
            _print(f"only {files} files may be open at a time here: {_MORE_FILES}")
            return FAILED
        command = _command(options.command)
        code = command(options, function) if options.command in _OF_DRIVERS else command(options)
        if not isinstance(code, int):
            import uvloop

            code = uvloop.run(code)
        sys.stdout.flush()  # what cannot be written is an error here, and not after the end
        return int(code)
    except JobFailed as error:
        what = "the job was ended" if isinstance(error, JobCancelled) else "job failed"
        _print(f"{what}: {error}", error)
        return FAILED
    except (CoordinationError, TransportError, UnknownJob) as error:
        _print(str(error), error)
        if isinstance(error, CoordinationError):
            from taskgraph.launch.access import advice

            if text := advice(error):
                print(text, file=sys.stderr)
        return UNREACHABLE
    except TaskGraphError as error:
        _print(str(error), error)
        return USAGE
    except KeyboardInterrupt:
        _print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        drop_unwritten()  # whoever read our output has enough
        return 0
    except (OSError, RuntimeError) as error:
        text = no_thread(error) if isinstance(error, RuntimeError) else _of_the_host(error)
        if not text:
            raise
        _print(text, error)
        return FAILED
    finally:
        if not getattr(sys.stdout, "closed", False):  # by a driver, which may have put something simpler there
            drop_unwritten()  # what was printed before an error: Python would fail of it, too, with a code of its own


def _of_the_host(error: OSError) -> str:
    """What to say where the host, or where the command was started, is at fault; "" where that is not the error."""
    if error.errno == errno.ENOENT and "temporary directory" in (error.strerror or ""):  # what `tempfile` says
        return f"{error.strerror}: set TMPDIR to a directory that can be written"
    if error.errno == errno.ENOENT and error.filename is None and _is_nowhere():  # what `os.getcwd` says
        return "the working directory was removed: `cd` to one that is there"
    from taskgraph.system.files import OF_THE_HOST

    if (text := no_process(error)) or error.errno not in OF_THE_HOST:
        return text
    text = f"standard output: {error.strerror}" if drop_unwritten() else str(error)
    return f"{text}: {_MORE_FILES}" if error.errno == errno.EMFILE else text


def _is_nowhere() -> bool:
    """Whether the working directory is gone, as that of a shell where a clone was made anew from another one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _print(text: str, error: Exception | None = None) -> None:
    from taskgraph.observe.screen import say

    for line in (text, *getattr(error, "__notes__", ())):
        say(line)


def tell_of_threads() -> None:
    """Before this process ends: Python waits for threads that are no daemons, as long as that takes, and says nothing.

    A driver may have started one where it is imported.
    """
    if all(thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        return
    teller = threading.Timer(_THREADS_S, _tell_of_threads)  # those of a pool end as soon as Python is about to
    teller.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread is to be had: nor is one needed
        teller.start()


def _tell_of_threads() -> None:
    main_thread = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main_thread]
    if names and not main_thread.is_alive():
        text = f"it is done, and waits for threads that the driver started: {', '.join(names)}"
        _print(f"{text} (Python ends without them if they are made with daemon=True; Ctrl-C ends it)")


def driver_main(function: JobFunction[...]) -> None:
    """`tg.main(fit)` at the end of a driver: the command line with this driver; no command means run.

    Raises:
        JobError: it is given something else than a job function, or a driver calls it while it is imported, or where an
            event loop runs.
    """
    from taskgraph.driver.loading import check_no_loop, check_not_importing
    from taskgraph.jobs import check_job_function  # as the driver has; most commands do without

    check_job_function(function)
    check_not_importing(function.__name__)  # before a node's own arguments are taken for those of the command line
    check_no_loop("tg.main", f"`await tg.arun({function.__name__}(...))`")
    obey_sigterm()
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] not in _COMMANDS and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["run", *arguments]
    code = main(arguments, function)
    tell_of_threads()
    sys.exit(code)
