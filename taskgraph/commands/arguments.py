"""The arguments of every command, and what the command line says about wrong ones.

This module loads neither numpy nor gRPC: `--help`, `--version` and a mistyped command answer at once.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from taskgraph.version import VERSION

if TYPE_CHECKING:
    from taskgraph.clusters.api import Launcher
    from taskgraph.jobs import JobFunction

__all__ = ["COMMANDS", "USAGE", "add_access_options", "add_listen_options", "parser"]

USAGE = 2
"""The exit code of a wrong command line."""
_ONLY_JOB = "may be left out if only one job runs on this host and --etcd is not given"
_NEAR = 0.8
"""The least similarity of a suggestion: one letter more or less."""
_NO_COMMAND = re.compile(r"argument COMMAND: invalid choice: (['\"])(.*?)\1")
_SHOW_ALL = "--help-all"

COMMANDS = {
    "Run": {
        "run": "running:run",
        "map": "mapping:map_command",
        "submit": "submitting:submit",
        "launch": "joining:launch",
        "node": "joining:node",
    },
    "Look": {
        "status": "looking:status",
        "shards": "shards:shards",
        "events": "looking:events",
        "result": "looking:result",
        "logs": "placing:logs",
        "trace": "tracing:trace",
    },
    "Act": {
        "kill": "acting:kill",
        "drain": "acting:drain",
        "scale": "placing:scale",
        "chaos": "chaos:chaos",
        "shutdown": "acting:shutdown",
        "forget": "acting:forget",
    },
    "Set up": {
        "token": "acting:token",
        "certs": "certifying:certs",
    },
}
"""By group and name, the module and function of each command."""
_HELP = {
    "run": "Run a job with nodes on this host and follow it to its end.",
    "map": "Call a function with each line of a file, or each file, on nodes of this host.",
    "submit": "Submit a job to an etcd; with --on also start its nodes, on Slurm or Kubernetes.",
    "launch": "Start nodes on this host for a submitted job.",
    "node": "Run one node of a job in this process.",
    "status": "Show how fast and how safe a job is, and what it waits for.",
    "shards": "Show which pieces of a job's queues and maps are done, and which are slow.",
    "events": "Show what happened to a job.",
    "result": "Print the result of a job that ended.",
    "logs": "Print what the nodes of a job print.",
    "trace": "Write what the nodes of a job do to a file for ui.perfetto.dev.",
    "kill": "Send a signal (SIGKILL) to the node of a task.",
    "drain": "Ask a node to hand over its tasks and leave.",
    "scale": "Change how many nodes a job has.",
    "chaos": "Cause random faults on this host, and show what follows.",
    "shutdown": "End a job without a result.",
    "forget": "Delete what your etcd keeps of jobs that have ended.",
    "token": "Print the token of a job of this host.",
    "certs": "Make certificates, for TLS in a test cluster.",
}


def _closest(word: str, known: Sequence[str]) -> str:
    """Returns the most similar known word; "": none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(word, known, 1, _NEAR)), "")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with a suggestion.

    Options cannot be abbreviated: `--node 2` must not mean `--nodes 2`, since `--node` is an option of other commands.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        if wrong := _NO_COMMAND.match(message):
            message = _no_command_text(wrong[2])
        what, _, words = message.partition("unrecognized arguments: ")
        if not what:
            message += self._suggestion(words.split())
        see = " See" if message.endswith("?") else "; see"
        self.exit(USAGE, f"{self.prog}: {message}{see} `{self.prog} --help`\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # so that a full disk is reported as an error of this command
        super().exit(status, message)

    def _suggestion(self, words: Sequence[str]) -> str:
        """Returns a hint on the first of the unknown words that is like an option; "": none is."""
        for word in words:
            if "=" in word and not word.startswith("-") and "-o" in self._option_string_actions:
                return f" (an option of the job is set with -o {word})"
            name, known = word.partition("=")[0], [o for o in self._option_string_actions if o.startswith("--")]
            if len(name) <= len("--"):
                continue
            if near := next((o for o in known if o.startswith(name)), "") or _closest(name, known):
                return f" (did you mean {near}?)"
        return ""


def _no_command_text(word: str) -> str:
    """Returns the message for a word that is no command, with what may have been meant."""
    known = [name for group in COMMANDS.values() for name in group]
    if near := _closest(word, known):
        return f"no command {word!r}; did you mean {near}?"
    run = f"; a driver is run with `taskgraph run {word}`" if word.endswith(".py") or ":" in word else ""
    return f"no command {word!r}{run}"


class _Command(_Parser):
    """The parser of one command. Reports unknown arguments itself, so that the message names this command's help."""

    function: JobFunction[...] | None = None
    """The driver's job function, for `tg.main`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            message = self._option_of_job_text(options, unknown) or f"unrecognized arguments: {' '.join(unknown)}"
            self.error(message)
        for action in self._actions:
            # An empty value comes from an unset variable of a script, and must not mean the default. JOB is checked
            # in `common.find_entry`.
            if getattr(options, action.dest, None) == "" and action.dest != "job":
                name = "/".join(action.option_strings) or action.metavar
                otherwise = "" if action.required else ", or leave it out"
                self.error(f"argument {name}: it is empty: give a value{otherwise}")
        return options, unknown

    def _option_of_job_text(self, options: argparse.Namespace, unknown: Sequence[str]) -> str:
        """Returns the message for `run fit.py --epochs 5`, where `epochs` is an option of the job; else ""."""
        driver: str = getattr(options, "driver", "")
        if not unknown[0].startswith("--") or (not driver and self.function is None):
            return ""
        from taskgraph.driver.loading import load_driver
        from taskgraph.errors import TaskGraphError

        try:
            function = self.function or load_driver(driver)
            known = function.options()
        except TaskGraphError:
            return ""
        name, _, value = unknown[0][2:].replace("-", "_").partition("=")
        value = unknown[0].partition("=")[2] or next((word for word in unknown[1:2] if not word.startswith("-")), "")
        if name not in known:
            return ""
        return f"{name} is an option of {function.__name__}: -o {name}={value or 'VALUE'}"


class _Help(argparse.Action):
    """`--help` and `--help-all`. After a driver they also show the options of its job."""

    function: JobFunction[...] | None = None

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        driver = getattr(namespace, "driver", None)
        function = self.function
        if driver is not None:
            from taskgraph.driver.loading import load_driver

            function = load_driver(driver)
        if function is not None:
            from taskgraph.options import help_text

            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            own = f"options of {function.__name__}:\n{help_text(function.options())}"
            parser.description = f"{parser.description}\n\n{own}"
        for action in parser._actions:
            if option == _SHOW_ALL and isinstance(action, _HelpAllOnly):
                action.help = action.whole_help
        parser.print_help()
        parser.exit()


class _HelpAllOnly(argparse._StoreAction):
    """An option that only `--help-all` lists."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.whole_help, self.help = self.help, argparse.SUPPRESS


def _grouped_help() -> str:
    """Returns the help of the whole program: all commands, by group."""
    lines = ["Run and watch taskgraph jobs."]
    for group, commands in COMMANDS.items():
        lines += ["", f"{group}:", *(f"  {name:<9} {_HELP[name]}" for name in commands)]
    return "\n".join(lines)


def parser(words: Sequence[str] = (), *, driver: JobFunction[...] | None = None) -> argparse.ArgumentParser:
    """Makes the parser of the whole command line.

    Args:
        words: the command line: `--on LAUNCHER` adds that launcher's options.
        driver: the job function, for `tg.main`, where the driver is the program itself.
    """
    top = _Parser(
        prog="taskgraph" if driver is None else None,
        usage="%(prog)s COMMAND ...",
        description=_grouped_help(),
        epilog="`taskgraph COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"taskgraph {VERSION}")
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=_Command, prog=top.prog, help=argparse.SUPPRESS
    )

    def add(name: str, *, job: bool = False, of_driver: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, description=_HELP[name], add_help=False)
        text = "show this, and the job's options after a driver, and exit" if of_driver else "show this and exit"
        showing: Any = made.add_argument("-h", "--help", action=_Help, nargs=0, dest=argparse.SUPPRESS, help=text)
        all_of_it: Any = made.add_argument(
            _SHOW_ALL,
            action=_Help,
            nargs=0,
            dest=argparse.SUPPRESS,
            help="also list the options for etcd's users and TLS",
        )
        if of_driver:
            showing.function = all_of_it.function = driver
            made.function = driver
            if driver is None:
                made.add_argument("driver", metavar="DRIVER", help="module[:function] or path.py[:function]")
            _add_driver_options(made)
        if job:
            made.add_argument("job", metavar="JOB", nargs="?", help=f"the job's name; {_ONLY_JOB}")
        return made

    launcher = _launcher_of(words)
    _add_running(add, driver, launcher)
    _add_looking(add, launcher)
    _add_acting(add, launcher)
    _add_setting_up(add)
    for name, made in commands.choices.items():  # last, so that `--help` begins with the command's own options
        if name not in ("certs", "map"):
            add_access_options(made)
    return top


def _launcher_of(words: Sequence[str]) -> Launcher | None:
    """Returns the launcher of `--on NAME`; None: none is named."""
    for word, following in itertools.pairwise([*words, ""]):
        name = following if word == "--on" else word.removeprefix("--on=") if word.startswith("--on=") else ""
        if name:
            from taskgraph.clusters.api import find_launcher

            return find_launcher(name)
    return None


def _add_launcher(made: argparse.ArgumentParser, launcher: Launcher | None, *, submit: bool = False) -> None:
    """Adds --on, and the options of the launcher that it names."""
    text = "start its nodes on this: local, slurm, kubernetes; `--on NAME --help` shows more options"
    otherwise = "where the job is: local, slurm, kubernetes; for jobs that this host did not submit"
    made.add_argument("--on", metavar="NAME", help=text if submit else otherwise)
    if launcher is None:
        return
    group = made.add_argument_group("options of this launcher")
    launcher.add_place_options(group)
    if submit:
        launcher.add_options(group)


def _add_submitting(made: argparse.ArgumentParser, launcher: Launcher | None) -> None:
    _add_beginning(made)
    _add_launcher(made, launcher, submit=True)
    made.add_argument("--nodes", type=int, metavar="N", help="with --on: how many nodes (4)")
    text = "with --on: further nodes, of another priority, that the scheduler may take away"
    made.add_argument("--extra-nodes", type=int, default=0, metavar="N", help=text)
    text = "the priority class (Kubernetes) or partition (Slurm) of the extra nodes"
    made.add_argument("--extra-priority", metavar="NAME", help=text)
    made.add_argument(
        "--dry-run", action="store_true", help="with --on: print what would be applied, and apply nothing"
    )
    made.add_argument("--wait", action="store_true", help="follow the job to its end, and print its values")
    text = "with --wait, --on: also write the values to this file (of a pod), as JSON; `-`: print them so"
    made.add_argument("--result", metavar="FILE", help=text)
    made.add_argument("--within", metavar="NAME", help="with --wait: in a pod that this launcher started (kubernetes)")
    text = "an id: if this run was submitted before, it is not submitted again (for scripts that may be restarted)"
    made.add_argument("--run", metavar="ID", help=text)
    made.add_argument("--insecure-listen", action="store_true", help="with --on: nodes listen without TLS")


def _add_running(add: Any, driver: JobFunction[...] | None, launcher: Launcher | None) -> None:
    run = add("run", of_driver=True)
    add_listen_options(run, "let nodes on other hosts join: listen on this address")
    _add_run_options(run, "node processes on this host (4); 0: all in this process, without etcd")
    _add_map(add("map"))
    _add_submitting(add("submit", of_driver=True), launcher)
    launch = add("launch")
    without = _ONLY_JOB if driver is None else "without it: as run"
    text = f"the job's name, or a driver as for run; {without}"
    launch.add_argument("job", metavar="JOB_OR_DRIVER", nargs="?", help=text)
    _add_driver_options(launch, "with a driver: ")
    add_listen_options(launch, "listen for nodes on other hosts, on this address")
    _add_run_options(launch, "node processes on this host (4)", "with a driver: ")
    node = add("node")
    node.add_argument("--job", required=True, help="the job's name; the job may be submitted later")
    node.add_argument("--name", help="the node's name")
    text = "the exit code if it was drained, or got SIGTERM, and the job goes on (0)"
    node.add_argument("--drained-code", type=int, default=0, metavar="N", help=text)
    text = "a file that is there while the node's replicas, and those of its tasks, are in sync"
    node.add_argument("--ready-file", metavar="FILE", help=text)
    add_listen_options(node, "listen for nodes on other hosts, on this address")


def _add_map(made: argparse.ArgumentParser) -> None:
    made.add_argument("function", metavar="FUNCTION", help="MODULE:FUNCTION or FILE.py:FUNCTION; it takes a text")
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--lines", metavar="FILE", help="a piece is a line of this file; `-`: of standard input")
    text = "a piece is the path of a file that matches, as '**/*.txt'; may be given again"
    which.add_argument("--files", action="append", metavar="PATTERN", help=text)
    made.add_argument("--nodes", type=int, default=4, metavar="N", help="node processes (4); 0: all in this process")
    made.add_argument("--output", metavar="FILE", help="write the results to this file, when all are there")
    made.add_argument(
        "--attempts", type=int, default=3, metavar="N", help="how many errors in one piece are too many (3)"
    )
    made.add_argument("--set-aside", action="store_true", help="go on without pieces that fail too often")
    made.add_argument("--resume", action="store_true", help="compute only what an earlier call lacks")
    made.add_argument("--name", help="of the job, and of what --resume goes on from (that of the function)")


def _add_looking(add: Any, launcher: Launcher | None) -> None:
    status = add("status", job=True)
    status.add_argument("--tasks", action="store_true", help="also a row for each task")
    status.add_argument("--task", metavar="T[-T],...", help="a row for each of these tasks: 5, or 3-7,12")
    status.add_argument("--json", action="store_true", help="one line of JSON, for programs")
    status.add_argument("--watch", action="store_true", help="again every second, until the job ends")
    shards = add("shards", job=True)
    shards.add_argument("--json", action="store_true", help="one line of JSON, for programs")
    shards.add_argument("--watch", action="store_true", help="again every second, until the job ends")
    events = add("events", job=True)
    events.add_argument("--json", action="store_true", help="each event as a line of JSON")
    events.add_argument("--follow", action="store_true", help="also events to come, until the job ends")
    result = add("result", job=True)
    result.add_argument("--json", action="store_true", help="one line of JSON, with the reports")
    logs = add("logs", job=True)
    logs.add_argument("--node", metavar="NAME", help="only of this node")
    logs.add_argument("--follow", action="store_true", help="also lines to come, until the job ends")
    _add_launcher(logs, launcher)
    trace = add("trace", job=True)
    text = "number of whole epochs, or of steps of an elastic job (20)"
    trace.add_argument("--epochs", "--steps", type=int, default=20, metavar="N", help=text)
    text = "trace one epoch (step) of N; 1: all; default: all, or fewer so that a fast job loses less than 3 %%"
    trace.add_argument("--every", type=int, metavar="N", help=text)
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="the file to write (trace.json)")


def _add_acting(add: Any, launcher: Launcher | None) -> None:
    kill = add("kill", job=True)
    kill.add_argument("--task", type=int, metavar="T", help="the node of this task's primary")
    kill.add_argument("--backup", action="store_true", help="with --task: a node of one of its backups instead")
    kill.add_argument("--node", metavar="NAME", help="this node; with --task the node must hold that task")
    kill.add_argument("--signal", default="SIGKILL", metavar="NAME", help="another signal, by name or number (SIGKILL)")
    kill.add_argument("--force", action="store_true", help="even if the job fails, because only this node has a state")
    drain = add("drain", job=True)
    drain.add_argument("--node", metavar="NAME", required=True, help="the node, as `status` names it")
    drain.add_argument("--force", action="store_true", help="even if no other node can take over")
    scale = add("scale", job=True)
    scale.add_argument("nodes", type=int, metavar="N", help="how many nodes it is to have")
    _add_launcher(scale, launcher)
    chaos = add("chaos", job=True)
    chaos.add_argument("--mtbf", type=float, default=15.0, metavar="S", help="mean time between two faults (15)")
    chaos.add_argument("--for-s", type=float, metavar="S", help="end after this time; default: with the job")
    chaos.add_argument("--kinds", default="kill,stop,term", metavar="K,...", help="kill, stop, term (default all)")
    chaos.add_argument("--seed", type=int, metavar="N", help="seed of the choice of faults")
    chaos.add_argument("--lossy", action="store_true", help="also hit the only replica of a task, or the only worker")
    _add_launcher(add("shutdown", job=True), launcher)
    add("forget").add_argument("job", metavar="JOB", nargs="+", help="the jobs' names")


def _add_setting_up(add: Any) -> None:
    add("token", job=True)
    certs = add("certs")
    certs.add_argument("directory", metavar="DIR", help="the folder to write; nodes and clients take it as --tls DIR")
    certs.add_argument("--host", action="append", metavar="HOST", help="a name or address by which nodes are reached")
    certs.add_argument("--ca", metavar="DIR", help="sign with the authority in this folder")
    certs.add_argument("--days", type=int, default=90, metavar="N", help="how long the certificate is valid (90)")
    certs.add_argument("--force", action="store_true", help="overwrite existing files")


def _add_driver_options(made: argparse.ArgumentParser, when: str = "") -> None:
    """Adds what a driver takes; `when` begins each help text."""
    made.add_argument("-o", "--option", action="append", metavar="NAME=VALUE", help=f"{when}an option of the job")
    made.add_argument("--set", action="append", metavar="NAME=VALUE", help=f"{when}a setting (docs/settings.md)")
    made.add_argument("--name", help=f"{when}another name for the job")
    text = f"{when}the job does not begin with fewer nodes"
    made.add_argument("--min-nodes", type=int, metavar="N", help=text)


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
        help=f"{when}as --resume, also if the driver or taskgraph changed since; the state must still fit",
    )
    text = f"{when}start from the beginning, although there are checkpoints"
    which.add_argument("--fresh", action="store_true", help=text)


def add_access_options(made: argparse.ArgumentParser) -> None:
    """Adds --etcd, --token-file, and the options for users and TLS, of etcd and between nodes."""
    group = made.add_argument_group("etcd (also TASKGRAPH_ETCD, TASKGRAPH_ETCD_USER etc., or taskgraph.toml)")
    group.add_argument(
        "--etcd", metavar="HOST:PORT,...", help="endpoints of your etcd, or a URL of what takes its place"
    )
    text = "the job's token; `submit` and `run` write the file if it is missing"
    group.add_argument("--token-file", metavar="FILE", help=text)
    names = ("--etcd-ca", "--cacert")
    group.add_argument(*names, action=_HelpAllOnly, metavar="FILE", help="authority of etcd's certificates")
    group.add_argument("--etcd-cert", "--cert", action=_HelpAllOnly, metavar="FILE", help="client certificate for etcd")
    group.add_argument("--etcd-key", "--key", action=_HelpAllOnly, metavar="FILE", help="key of the client certificate")
    group.add_argument("--etcd-user", action=_HelpAllOnly, metavar="NAME", help="user, if etcd has users")
    text = "the user's password (or TASKGRAPH_ETCD_PASSWORD)"
    group.add_argument("--etcd-password-file", action=_HelpAllOnly, metavar="FILE", help=text)
    nodes = made.add_argument_group("TLS between nodes (also TASKGRAPH_TLS, TASKGRAPH_TLS_CA etc., or taskgraph.toml)")
    text = "a folder with ca.pem, cert.pem and key.pem (`taskgraph certs`)"
    nodes.add_argument("--tls", action=_HelpAllOnly, metavar="DIR", help=text)
    text = "authority of all nodes' and clients' certificates"
    nodes.add_argument("--tls-ca", action=_HelpAllOnly, metavar="FILE", help=text)
    nodes.add_argument("--tls-cert", action=_HelpAllOnly, metavar="FILE", help="our certificate")
    nodes.add_argument("--tls-key", action=_HelpAllOnly, metavar="FILE", help="its key")
    text = "the name that all nodes' certificates have, in place of their hosts' names"
    nodes.add_argument("--tls-name", action=_HelpAllOnly, metavar="NAME", help=text)


def add_listen_options(made: argparse.ArgumentParser, help_text: str) -> None:
    """Adds --listen and the options that go with it."""
    made.add_argument("--listen", metavar="HOST", help=help_text)
    text = "listen on these ports only, for a firewall: a node takes two of them"
    made.add_argument("--ports", action=_HelpAllOnly, metavar="FIRST-LAST", help=text)
    text = "the name or address by which other hosts reach HOST, if that differs from HOST"
    made.add_argument("--advertise", action=_HelpAllOnly, metavar="NAME", help=text)
    made.add_argument(
        "--insecure-listen",
        action="store_true",
        help="listen without TLS, although HOST is not loopback: everybody on that network can read along",
    )
