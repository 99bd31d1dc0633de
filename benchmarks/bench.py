"""Everything side by side: our framework, its peers, and what the machine allows.

    make bench [BENCH_ARGS='--short --works small --json out.json']
    python benchmarks/bench.py [--short | --long] [--works KEY,...] [--contenders 'NAME;...'] [--repeats 5]

Contenders of one work run in turns (A B C A B C ...), every figure is a median of the rounds, every result is checked.
What is not installed, fails, or hangs is named, and left out of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from contest import SEGMENTS_IN, adopt_orphans, ended_by, run
from figures import UNITS, Line, Rounds, lines_of, put_into, table
from suite import WORKS, Contender, Work, tree_of

HERE = Path(__file__).parent
_SHORT, _USUAL, _LONG = (2, 1.0), (3, 2.0), (7, 4.0)


class Pythons:
    """Which interpreter runs a contender: ours, or that of the peers' environment, or none."""

    def __init__(self, peers: str) -> None:
        # Absolute, since contenders run elsewhere; not resolved, since a link is what makes it an environment's.
        self._all = [sys.executable, *([os.path.abspath(peers)] if peers and Path(peers).exists() else [])]
        self._known: dict[tuple[str, tuple[str, ...]], str] = {}

    def find(self, needs: tuple[str, ...]) -> tuple[str | None, str]:
        """The first that can import all of `needs`, or why there is none."""
        why = ""
        for python in self._all:
            why = self._try(python, needs)
            if not why:
                return python, ""
        return None, f"skipped: {why}"

    def _try(self, python: str, needs: tuple[str, ...]) -> str:
        if (python, needs) not in self._known:
            program = "".join(f"import {module}\n" for module in needs)
            with tempfile.TemporaryDirectory() as segments:
                env = {**os.environ, SEGMENTS_IN: segments}
                done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, env=env)
            said = done.stderr.strip().splitlines()
            self._known[python, needs] = "" if done.returncode == 0 else said[-1] if said else "cannot be imported"
        return self._known[python, needs]


def chosen(keys: str, names: str, *, barred: bool = False) -> list[Work]:
    """The works asked for, with the contenders asked for; rows that lack one of theirs go. `barred`: no bar, no row."""
    wanted = [key for key in keys.split(",") if key]
    known = {work.key: work for work in WORKS}
    found = {key: known.get(key) or tree_of(key) for key in wanted}
    unknown = sorted(key for key, work in found.items() if work is None)
    if unknown:
        raise SystemExit(
            f"no work {', '.join(unknown)}; there are: {', '.join(known)}; "
            "and TxN, a tree of T tasks, at least 2, with N numbers of 8 bytes: 10x4096"
        )
    only = [name.strip() for name in names.split(";") if name.strip()]
    works = [work for work in found.values() if work is not None] if wanted else list(WORKS)
    unknown = sorted(set(only) - {one.name for work in works for one in work.contenders})
    if unknown:
        there = dict.fromkeys(one.name for work in works for one in work.contenders)
        raise SystemExit(f"no contender {'; '.join(unknown)}; there are: {'; '.join(there)}")
    if barred:
        works = [_with_bars(work) for work in works]
    return [_reduced(work, only) if only else work for work in works]


def _with_bars(work: Work) -> Work:
    """The work with what has a bar; or all of it, where nothing has: it is there to be recorded."""
    rows = tuple(row for row in work.rows if row.bar is not None)
    names = {name for row in rows for name in (row.subject, row.against)}
    kept = tuple(one for one in work.contenders if one.name in names)
    return (
        replace(work, contenders=kept, rows=tuple(r for r in work.rows if {r.subject, r.against} <= names | {""}))
        if rows
        else work
    )


def _reduced(work: Work, only: list[str]) -> Work:
    kept = tuple(one for one in work.contenders if one.name in only)
    names = {one.name for one in kept} | {""}
    rows = tuple(row for row in work.rows if row.subject in names and row.against in names)
    return replace(work, contenders=kept, rows=rows)


def contest(
    work: Work, repeats: int, seconds: float, pythons: Pythons, rounds: Rounds, missing: dict[str, str]
) -> None:
    """Runs a work's contenders in turns. Adds to `rounds`, and to `missing` what is not as it should be."""
    out: set[str] = set()
    for one in work.contenders:
        python, why = pythons.find(one.needs)
        if python is None:
            out.add(one.name)
            missing[one.name] = why
            print(f"  {one.name}: {why}", flush=True)
    for number in range(repeats):
        for one in work.contenders:
            if one.name in out:
                continue
            python, _ = pythons.find(one.needs)
            assert python is not None
            outcome = run(_command(python, one, seconds), env=_env(one), timeout_s=work.timeout_s + 4 * seconds)
            if outcome.figures:
                rounds.setdefault(one.name, {})[number] = outcome.figures
            elif one.name in missing:
                out.add(one.name)  # it failed twice
            if outcome.why_not:
                missing[one.name] = outcome.why_not
            shown = ", ".join(f"{value:,.4g} {UNITS[name]}" for name, value in outcome.figures.items() if name in UNITS)
            print(
                f"  {number + 1}/{repeats} {one.name}: {shown} {outcome.why_not} ({outcome.wall_s:.1f} s)", flush=True
            )


def _command(python: str, one: Contender, seconds: float) -> list[str]:
    return [python, str(HERE / one.script), *one.arguments, "--seconds", str(seconds)]


def _env(one: Contender) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    return {**threads, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **dict(one.env)}


def machine() -> str:
    """What these figures were measured on."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores ({model or platform.machine()}), {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} before the first run"
    )


def main(given: argparse.Namespace) -> int:
    repeats, seconds = _SHORT if given.short else _LONG if given.long else _USUAL
    repeats, seconds = given.repeats or repeats, given.seconds or seconds
    works = chosen(given.works, given.contenders, barred=given.bars)
    if given.into:  # before an hour of measuring, not after
        try:
            put_into(Path(given.into).read_text("utf-8"), "", [])
        except (OSError, ValueError) as error:
            raise SystemExit(f"--into {given.into}: {error}") from error
    if given.json:
        try:
            Path(given.json).touch()
        except OSError as error:
            raise SystemExit(f"--json {given.json}: {error}") from error
    pythons = Pythons(given.peers_python)
    described = machine()
    print(f"{described}\n{repeats} rounds of {seconds:g} s each", flush=True)
    adopt_orphans()
    lines: list[Line] = []
    raw: dict[str, Rounds] = {}
    interrupted = False
    with ended_by([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]):
        try:
            for work in works:
                print(f"{work.title}", flush=True)
                rounds = raw.setdefault(work.key, {})
                missing: dict[str, str] = {}
                try:
                    contest(work, repeats, seconds, pythons, rounds, missing)
                finally:
                    lines += lines_of(work, rounds, missing)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted; what was measured until now:", flush=True)
    print(f"\n{table(lines)}" if lines else "nothing was measured")
    if given.json:
        found = {"machine": described, "repeats": repeats, "seconds": seconds, "runs": raw}
        Path(given.json).write_text(
            json.dumps({**found, "lines": [{**asdict(x), "met": x.met} for x in lines]}, indent=1)
        )
    if given.into and not interrupted:
        page = Path(given.into)
        measured = f"{described}. {repeats} rounds of {seconds:g} s each."
        page.write_text(put_into(page.read_text("utf-8"), measured, lines), "utf-8")
    return 130 if interrupted else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="2 rounds of 1 s")
    parser.add_argument("--long", action="store_true", help="7 rounds of 4 s")
    parser.add_argument(
        "--works",
        default="",
        help=f"of: {', '.join(work.key for work in WORKS)}; or any tree, TxN: T tasks, N numbers of 8 bytes (10x4096)",
    )
    parser.add_argument("--contenders", default="", help="only these, separated by ';'")
    parser.add_argument("--bars", action="store_true", help="only contenders that there is a bar for")
    parser.add_argument("--repeats", type=int, default=0, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.0, help="measured in each run")
    parser.add_argument("--peers-python", default="", help="the interpreter of the environment peers are installed in")
    parser.add_argument("--json", default="", help="a file for all figures")
    parser.add_argument("--into", default="", help="a page whose results are to be these: docs/performance.md")
    sys.exit(main(parser.parse_args()))
