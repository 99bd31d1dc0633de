"""The command line: `taskgraph ...`, `python -m taskgraph ...`, and `tg.main(job_function)` in a driver.

Exit codes: 0 well; 1 the job failed; 2 the command or the driver is wrong; 3 etcd or a node cannot be reached; 130
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

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
from taskgraph.launch.threads_env import set_thread_env
from taskgraph.system.files import OF_THE_HOST
from taskgraph.system.signals import hear_of_children, obey_sigterm
from taskgraph.system.streams import drop_unwritten, make_good
from taskgraph.version import VERSION

if TYPE_CHECKING:
    from taskgraph.jobs import JobFunction

__all__ = ["driver_main", "main", "tell_of_threads"]

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
_ONLY_JOB = "may be left out where only one job runs on this host, and no --etcd is given"
_NEAR = 0.8
"""Of two options: what is less alike than one letter more or less makes it has nothing to do with the other."""
_NO_COMMAND = re.compile(r"argument COMMAND: invalid choice: '(\w+)'")
_OF_DRIVERS = ("run", "submit", "launch")
_THREADS_S = 2.0
"""Who waits longer for threads to end is told of it."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one paragraph, as every other error is told, and where the options are.

    Options are written out: `--node 2` is no other way to say `--nodes 2`, since `--node` is an option elsewhere.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        if (told := _NO_COMMAND.match(message)) and (near := difflib.get_close_matches(told[1], _COMMANDS, 1, _NEAR)):
            message += f" (did you mean {near[0]}?)"
        what, _, words = message.partition("unrecognized arguments: ")
        if not what:
            message += self._meant(words.split())
        self.exit(USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # a help that cannot be written is an error here, and not after the end
        super().exit(status, message)

    def _meant(self, words: Sequence[str]) -> str:
        """What is near to the first of these words that something is near to."""
        for word in words:
            if "=" in word and not word.startswith("-"):
                return f" (an option of the job is set with -o {word})"
            name, known = word.partition("=")[0], [o for o in self._option_string_actions if o.startswith("--")]
            near = [o for o in known if o.startswith(name)] or difflib.get_close_matches(name, known, 1, _NEAR)
            if len(name) > len("--") and near:
                return f" (did you mean {near[0]}?)"
        return ""


class _Command(_Parser):
    """Refuses what it does not know itself, else the parser of all commands would, and point to its own help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        for action in self._actions:
            # A script's variable that was never set must not do what leaving it out does. (JOB has words of its own.)
            if getattr(options, action.dest, None) == "" and action.dest != "job":
                name = "/".join(action.option_strings) or action.metavar
                otherwise = "" if action.required else ", or leave it out"
                self.error(f"argument {name}: it is empty: give a value{otherwise}")
        return options, unknown


class _Help(argparse.Action):
    """`--help`: behind a driver it tells the options of its job, too."""

    function: JobFunction[...] | None = None

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        driver = getattr(namespace, "driver", None)
        function = self.function
        if driver is not None:
            from taskgraph.driver.loading import load_driver

            function = load_driver(driver)
        if function is not None:
            from taskgraph.options import help_text

            # Before the many that every command takes.
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            own = f"options of {function.__name__}:\n{help_text(function.options())}"
            parser.description = f"{parser.description}\n\n{own}"
        parser.print_help()
        parser.exit()


def parser(*, driver: JobFunction[...] | None = None) -> argparse.ArgumentParser:
    """The parser. `driver`: for `tg.main`, where the driver is the file that runs."""
    from taskgraph.commands.common import add_etcd_options, add_listen_options

    top = _Parser(prog="taskgraph" if driver is None else None, description="Run and watch taskgraph jobs.")
    top.add_argument("--version", action="version", version=f"taskgraph {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Command)

    def add(name: str, help_text: str, *, job: bool = False, of_driver: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help_text, description=help_text, add_help=not of_driver)
        if of_driver:
            text = "show this, and the job's options where a driver was named, and exit"
            helping: Any = made.add_argument("-h", "--help", action=_Help, nargs=0, dest=argparse.SUPPRESS, help=text)
            helping.function = driver
            if driver is None:
                made.add_argument("driver", metavar="DRIVER", help="module[:function] or path.py[:function]")
            _add_driver_options(made)
        if job:
            made.add_argument("job", metavar="JOB", nargs="?", help=f"the job's name; {_ONLY_JOB}")
        with_etcd.append(made)
        return made

    with_etcd: list[argparse.ArgumentParser] = []
    run = add("run", "Run a job with nodes on this host and follow it to its end.", of_driver=True)
    add_listen_options(run, "let nodes on other hosts join: listen on this address")
    _add_run_options(run, "node processes on this host (4); 0: all in this process, without etcd")
    _add_beginning(add("submit", "Submit a job to an etcd; nodes are started elsewhere.", of_driver=True))
    launch = add("launch", "Start nodes on this host for a submitted job (or a driver: like run).")
    without = _ONLY_JOB if driver is None else "without it: as run"
    text = f"the job's name, or a driver as for run; {without}"
    launch.add_argument("job", metavar="JOB_OR_DRIVER", nargs="?", help=text)
    _add_driver_options(launch, "with a driver: ")
    add_listen_options(launch, "listen for nodes on other hosts, on this address")
    _add_run_options(launch, "node processes on this host (4)", "with a driver: ")
    node = add("node", "Run one node of a job in this process.")
    node.add_argument("--job", required=True, help="the job's name; it may be submitted later")
    node.add_argument("--name", help="what people call the node")
    add_listen_options(node, "listen for nodes on other hosts, on this address")
    status = add("status", "What a job does, who does it, and what it waits for.", job=True)
    status.add_argument("--json", action="store_true", help="one line of JSON, for programs")
    status.add_argument("--watch", action="store_true", help="again every second, until the job ends")
    events = add("events", "What happened to a job.", job=True)
    events.add_argument("--json", action="store_true", help="each as a line of JSON")
    events.add_argument("--follow", action="store_true", help="and what happens next, until the job ends")
    result = add("result", "The result of a job that ended.", job=True)
    result.add_argument("--json", action="store_true", help="one line of JSON, values and reports too")
    trace = add("trace", "What every node of a running job does, as a file for https://ui.perfetto.dev.", job=True)
    trace.add_argument("--epochs", type=int, default=20, metavar="N", help="so many whole epochs (20)")
    text = "one epoch of N: 1 is all; default: all, or so few that a fast job loses less than 3 %%"
    trace.add_argument("--every", type=int, default=0, metavar="N", help=text)
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="where to (trace.json)")
    kill = add("kill", "Send a signal (SIGKILL) to the process that holds a task.", job=True)
    kill.add_argument("--task", type=int, metavar="T", help="the node of this task's primary")
    kill.add_argument("--backup", action="store_true", help="with --task: a node of one of its backups instead")
    kill.add_argument("--node", metavar="NAME", help="this node; with --task it must hold that")
    kill.add_argument("--signal", default="SIGKILL", metavar="NAME", help="another one, by name or number (SIGKILL)")
    kill.add_argument("--force", action="store_true", help="even if it alone has a task's state, and the job fails")
    drain = add("drain", "Ask a node to hand everything over and leave.", job=True)
    drain.add_argument("--node", metavar="NAME", required=True, help="which, as `status` names it")
    drain.add_argument("--force", action="store_true", help="also where no other node is there to take over")
    chaos = add("chaos", "Random faults on the nodes of a job of this host, and what followed.", job=True)
    chaos.add_argument("--mtbf", type=float, default=15.0, metavar="S", help="mean time between two faults (15)")
    chaos.add_argument("--for-s", type=float, metavar="S", help="end after this time; default: with the job")
    chaos.add_argument("--kinds", default="kill,stop,term", metavar="K,...", help="kill, stop, term (default all)")
    chaos.add_argument("--seed", type=int, metavar="N", help="of the choice of faults")
    chaos.add_argument("--lossy", action="store_true", help="hit the last replica in sync of a task, too")
    add("shutdown", "End a job without a result.", job=True)
    forget = add("forget", "Delete what your etcd keeps of jobs that have ended.")
    forget.add_argument("job", metavar="JOB", nargs="+", help="the jobs' names")
    add("token", "Print the token of a job of this host.", job=True)
    for made in with_etcd:  # last, so that `--help` begins with what the command itself takes
        add_etcd_options(made)
    text = "Make an authority and a certificate of it, for TLS in a test cluster."
    certs = commands.add_parser("certs", help=text, description=text)
    certs.add_argument("directory", metavar="DIR", help="where to; give it to every node and client as --tls DIR")
    certs.add_argument("--host", action="append", metavar="HOST", help="a name or address that nodes are reached by")
    certs.add_argument("--ca", metavar="DIR", help="sign with the authority that is there already")
    certs.add_argument("--days", type=int, default=90, metavar="N", help="how long the certificate is valid (90)")
    certs.add_argument("--force", action="store_true", help="overwrite what is there")
    return top


def _add_driver_options(made: argparse.ArgumentParser, when: str = "") -> None:
    """`when`: goes before the help of what only a driver takes."""
    made.add_argument("-o", "--option", action="append", metavar="NAME=VALUE", help=f"{when}an option of the job")
    made.add_argument("--set", action="append", metavar="NAME=VALUE", help=f"{when}a setting (docs/settings.md)")
    made.add_argument("--name", help=f"{when}another name for the job")


def _add_run_options(made: argparse.ArgumentParser, nodes: str, when: str = "") -> None:
    made.add_argument("--nodes", type=int, default=4, metavar="N", help=nodes)
    made.add_argument("--replace", action="store_true", help="start another node in place of one that dies")
    text = f"{when}end the job, as failed, after this many seconds"
    made.add_argument("--timeout", type=float, metavar="S", help=text)
    made.add_argument("--json", action="store_true", help=f"{when}the last line of output is the result as JSON")
    made.add_argument("--logs", action="store_true", help="show what tasks print, on standard error")
    _add_beginning(made, when)


def _add_beginning(made: argparse.ArgumentParser, when: str = "") -> None:
    which = made.add_mutually_exclusive_group()
    text = f"{when}go on from the job's newest checkpoint, if there is one"
    which.add_argument("--resume", action="store_true", help=text)
    which.add_argument(
        "--resume-changed",
        dest="resume",
        action="store_const",
        const="changed",
        help=f"{when}the same, also where the driver, or taskgraph, was changed since; the state must still fit",
    )
    text = f"{when}from the beginning, although there are checkpoints"
    which.add_argument("--fresh", action="store_true", help=text)


_LEAST_FILES = 64
"""A command needs some, and with fewer it fails wherever it happens to be."""
_MORE_FILES = "`ulimit -n 1024` allows more"

_COMMANDS = {
    "run": "running:run",
    "submit": "running:submit_command",
    "launch": "joining:launch",
    "node": "joining:node",
    "status": "looking:status",
    "events": "looking:events",
    "result": "looking:result",
    "trace": "tracing:trace",
    "kill": "acting:kill",
    "drain": "acting:drain",
    "chaos": "chaos:chaos",
    "shutdown": "acting:shutdown",
    "forget": "acting:forget",
    "token": "acting:token",
    "certs": "certifying:certs",
}
"""Where each is: only the one that runs is loaded. It returns its exit code, or is a coroutine that does."""


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
    if names and _ends():
        text = f"it is done, and waits for threads that the driver started: {', '.join(names)}"
        _print(f"{text} (Python ends without them if they are made with daemon=True; Ctrl-C ends it)")


def _ends() -> bool:
    """Whether this process is about to end; another one goes on, as a shell does in which a driver was run."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    waits: Any = threading._shutdown  # type: ignore[attr-defined]
    return frame is None or frame.f_code is waits.__code__


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
