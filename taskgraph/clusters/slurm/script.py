"""The batch script of a job on Slurm: an array of one-node jobs, whose elements start a node each. It does no I/O.

`taskgraph submit --on slurm --dry-run` prints the script, and `start` submits that very text. What it needs is in the
job's folder (`folder`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taskgraph.clusters.slurm.folder import Folder
from taskgraph.clusters.slurm.resources import UNQUOTED, Resources, check_header_value, parse_time_limit_s
from taskgraph.errors import JobError

__all__ = ["AGAIN", "ElementSpec", "array_words", "script", "split_patch"]

AGAIN = 75
"""The exit code of a node that left while the job goes on (EX_TEMPFAIL)."""
_PLACED = ("--array", "-a", "--output", "-o", "--nodes", "-N", "--ntasks", "-n", "--chdir", "-D")
_OURS = (*_PLACED, "--no-requeue", "--signal")
"""Options that a patch may not have."""
_MARGIN_S = 30
"""Between `drain_s` and the end of an element's time."""
_PLAIN = re.compile(r"[\w./@+:~-]+")
_WIDTH = 100
"""Characters of a continued line, without its indent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementSpec:
    """What each element runs.

    Attributes:
        job: the job's name.
        python: the interpreter, as the machines of the cluster find it.
        directory: where nodes work.
        folder: the job's folder.
        own_etcd: the first element brings an etcd.
        access: how commands reach etcd, the token and certificates: variables of the environment without TASKGRAPH_.
        submit: the words of `taskgraph submit` for the first element.
        node: further options of `taskgraph node`.
        listen: the host's own name or address, as the shell reads it between double quotes.
        drain_s: how long a node takes to leave, in seconds.
    """

    job: str
    python: str
    directory: Path
    folder: Folder
    own_etcd: bool
    access: Mapping[str, str]
    submit: tuple[str, ...]
    node: tuple[str, ...] = ()
    listen: str = "$(hostname)"
    drain_s: float


def array_words(first: int, count: int, partition: str = "") -> list[str]:
    """Returns the options of sbatch for an array of `count` elements from number `first` on.

    Args:
        partition: the array's partition; "": that of the script.
    """
    last = first + count - 1
    words = [f"--array={first}-{last}" if count > 1 else f"--array={first}"]
    return [*words, f"--partition={check_header_value('partition', partition)}"] if partition else words


def split_patch(text: str) -> tuple[list[str], list[str]]:
    """Splits a patch file into options for the header (its lines of #SBATCH) and shell lines to run before the node.

    Raises:
        JobError: an option that would break what taskgraph relies on.
    """
    header, shell = [], []
    for line in text.splitlines():
        if not line.startswith("#SBATCH"):
            shell.append(line)
            continue
        option = line.removeprefix("#SBATCH").strip()
        name = option.partition("=")[0].split(" ")[0]
        if name in _OURS:
            raise JobError(f"--patch: {line!r}: taskgraph sets {name} itself; leave the line out")
        header.append(option)
    while shell and not shell[-1].strip():
        shell.pop()
    return header, shell


def script(element: ElementSpec, resources: Resources, nodes: int, patch: str = "") -> str:
    """Returns the script of a job.

    Args:
        nodes: how many elements the array has; further arrays of this script are made by options of sbatch.
        patch: the text of the user's patch file.

    Raises:
        JobError: a value that cannot be written into it.
    """
    more, before = split_patch(patch)
    notice_s = round(element.drain_s) + _MARGIN_S
    if resources.time and 0 < parse_time_limit_s(resources.time) <= notice_s:
        raise JobError(
            f"--time {resources.time}: elements get SIGTERM {notice_s} s before their end (drain_s and {_MARGIN_S} s), "
            f"and so would leave as soon as they start: give more time, or a smaller drain_s (--set drain_s=10)"
        )
    header = [
        f"--job-name={element.job}",
        *array_words(0, nodes),
        "--nodes=1 --ntasks=1",
        *resources.lines(),
        f"--chdir={_quote_header_path(element.directory)}",
        f"--output={_quote_header_path(element.folder.logs).replace('%', '%%')}/%a.log --open-mode=append",
        "--requeue",
        f"--signal=TERM@{notice_s}",
        *more,
    ]
    return "\n".join(
        (
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in header),
            _INTRODUCTION.format(
                job=element.job,
                folder=shlex.quote(str(element.folder.path)),
                python=shlex.quote(element.python),
                access="".join(
                    f"export TASKGRAPH_{name}={_quote_in_folder(element.folder, value)}\n"
                    for name, value in element.access.items()
                ),
            ),
            *(("", *before) if before else ()),
            _FUNCTION.format(again=AGAIN),
            _companion_lines(element),
            _NODE.format(
                cpus=f" --cpus-per-task={resources.cpus}" if resources.cpus else "",
                job=shlex.quote(element.job),
                listen=_check_listen(element.listen),
                words="".join(f" {shlex.quote(word)}" for word in element.node),
                again=AGAIN,
            ),
        )
    )


_INTRODUCTION = """
# The taskgraph job {job}: each element of this array is a node. Elements may start, end and move to other machines
# while the job runs. `taskgraph scale {job} N` changes their number, `taskgraph shutdown {job}` ends the job.
folder={folder}
python={python}
{access}export PYTHONHASHSEED=0  # as of all nodes, which would start themselves again without it
element=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
name=$SLURM_ARRAY_TASK_ID.${{SLURM_RESTART_COUNT:-0}}
[ -e "$folder/ended" ] && exit 0  # the job ended while this element was waiting"""

_FUNCTION = """
# Gives the machine back, and queues this element again. `scancel` and `taskgraph scale` want it gone: it only ends.
queue_again() {{
    [ -z "$companion" ] || {{ kill "$companion"; wait "$companion"; }} 2>/dev/null
    for pause in 1 2 4 8 16; do  # slurmctld may be too busy to answer
        scontrol --oneliner show job "$element" >"$folder/left/$name" && break
        sleep $pause
    done
    grep -q ' JobState=RUNNING ' "$folder/left/$name" && grep -q ' Requeue=1 ' "$folder/left/$name" || exit 0
    for pause in 1 2 4 8 60; do
        scontrol requeue "$element" && sleep 60  # Slurm ends this script
        sleep $pause
    done
    exit {again}
}}"""

_FIRST = """
# The first element also {what}, and collects its values.
companion() {{
    trap 'kill $running; wait $running; exit' TERM
    pause=1
    while [ ! -e "$folder/ended" ]; do
        "$python" -P -m taskgraph.commands.slurm_companion "$folder" --element "$element"{own} -- \\
            {words} \\
            >>"$folder/logs/submit.log" 2>&1 &
        running=$!
        wait $running
        sleep $pause  # it failed, as submit.log says
        pause=$((pause < 30 ? 2 * pause : 30))
    done
}}
companion=
if [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then{forget}
    companion & companion=$!
fi"""

_FORGET = """
    rm -f "$folder/etcd.at\""""

_NODE = """
pause=1
while [ ! -e "$folder/ended" ]; do
    srun --quiet --ntasks=1{cpus} "$python" -P -m taskgraph node --job {job} --name "$name" \\
        --listen "{listen}"{words} --drained-code {again}
    code=$?
    [ -e "$folder/ended" ] && break
    case $code in
    0) break ;;  # the job has ended
    {again} | 143) queue_again ;;  # it got SIGTERM: Slurm wants the machine for others, or the time is over
    esac
    sleep $pause  # the node died: another one takes its place
    pause=$((pause < 30 ? 2 * pause : 30))
done
[ -z "$companion" ] || {{ wait "$companion"; exit "$(cat "$folder/ended")"; }}
"""


def _companion_lines(element: ElementSpec) -> str:
    return _FIRST.format(
        what="runs the job's etcd, submits the job" if element.own_etcd else "submits the job",
        own=f' --own-etcd "{_check_listen(element.listen)}"' if element.own_etcd else "",
        forget=_FORGET if element.own_etcd else "",
        words=_join_words(element.submit, "            "),
    )


def _quote_in_folder(folder: Folder, value: str) -> str:
    """Quotes a value for the shell. A path in the job's folder begins with `"$folder"`."""
    before, there, rest = value.partition(f"{folder.path}/")
    return f'{shlex.quote(before) if before else ""}"$folder"/{shlex.quote(rest)}' if there else shlex.quote(value)


def _join_words(words: Sequence[str], indent: str) -> str:
    """Quotes words and joins them to continued lines. An option and its value stay on one line."""
    parts: list[str] = []
    for word in words:
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("-"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) < _WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return f" \\\n{indent}".join(lines)


def _quote_header_path(path: Path) -> str:
    """Quotes a path for a line of #SBATCH, where `#` begins a comment."""
    text = str(path)
    if not UNQUOTED.isdisjoint(text) or "," in text:
        raise JobError(f"{text!r}: Slurm cannot use a folder with quotes, commas or backslashes in its name")
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def _check_listen(text: str) -> str:
    if not text or '"' in text or "\n" in text:
        raise JobError(f"--listen {text!r}: write a name or address, or '$(command)', without double quotes")
    return text
