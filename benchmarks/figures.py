"""From runs to a table: medians, ratios, bars. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from suite import Row, Work

__all__ = ["UNITS", "Line", "Rounds", "lines_of", "put_into", "table"]

Rounds = dict[str, dict[int, dict[str, float]]]
"""Contender -> round -> its figures by name. One that failed in a round has none of it."""

UNITS = {
    "rate": "epochs/s",
    "us": "us",
    "ms": "ms",
    "s": "s",
    "used_s": "s, names used",
    "gb_per_s": "GB/s",
    "us_per_task": "us per task",
    "peak_mib": "MiB, peak of a node",
    "peak_of_bound": "peak, of its bound",
}


@dataclass(frozen=True)
class Line:
    """A row of the table with what was measured.

    Attributes:
        ratio: of the medians; low, high: the extremes of the rounds' own ratios.
        met: None where there is no bar, or nothing to compare.
    """

    work: str
    unit: str
    subject: str
    against: str
    ours: float | None
    theirs: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    sense: str = ">="
    bar: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.bar is None or self.ratio is None:
            return None
        return self.ratio >= self.bar if self.sense == ">=" else self.ratio <= self.bar


def lines_of(work: Work, rounds: Rounds, missing: Mapping[str, str]) -> list[Line]:
    """The work's rows; `missing` says of a contender why it has no figures, or fewer than others."""
    return [_line(work, row, rounds, missing) for row in work.rows]


def _line(work: Work, row: Row, rounds: Rounds, missing: Mapping[str, str]) -> Line:
    ours, theirs = (
        {number: found[row.measure] for number, found in rounds.get(name, {}).items() if row.measure in found}
        for name in (row.subject, row.against)
    )
    note = "; ".join(f"{name}: {missing[name]}" for name in (row.subject, row.against) if name in missing)
    mine = statistics.median(ours.values()) if ours else None
    other = statistics.median(theirs.values()) if theirs else None
    line = Line(
        work.title, UNITS[row.measure], row.subject, row.against, mine, other, sense=row.sense, bar=row.bar, note=note
    )
    if mine is None or (row.against and other is None):
        return replace(line, note=note or f"{row.against if mine is not None else row.subject}: was not run")
    if other is None:
        return replace(line, ratio=mine, low=min(ours.values()), high=max(ours.values()))
    pairs = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()] or [mine / other]
    return replace(line, ratio=mine / other, low=min(pairs), high=max(pairs))


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table, which reads as plain text, too."""
    head = ("Work", "Of", "Against", "Median", "Its median", "Ratio", "Runs", "Bar", "Met")
    rows = [head, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = dict.fromkeys(line.note for line in lines if line.note)
    return "\n".join([*text, *(f"- {note}" for note in notes)])


_BEGIN, _END = "<!-- results -->\n", "<!-- end of results -->"


def put_into(page: str, described: str, lines: Sequence[Line]) -> str:
    """The page with its results replaced: what is between the two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, found, rest = page.partition(_BEGIN)
    _, again, after = rest.partition(_END)
    if not found or not again:
        raise ValueError(f"the page has no {_BEGIN.strip()} and {_END}")
    missed = sum(line.met is False for line in lines)
    unknown = sum(line.bar is not None and line.met is None for line in lines)
    summary = f"{sum(line.met is True for line in lines)} bars are met, {missed} are not"
    summary += f", {unknown} could not be looked at." if unknown else "."
    return f"{before}{found}\n{described}\n\n{summary}\n\n{table(lines)}\n\n{again}{after}"


def _cells(line: Line) -> tuple[str, ...]:
    bar = f"{line.sense} {line.bar:g}" if line.bar is not None else "-"
    met = {True: "yes", False: "NO", None: "-"}[line.met]
    spread = f"{_number(line.low)} to {_number(line.high)}" if line.low is not None else "-"
    return (
        f"{line.work} ({line.unit})",
        line.subject,
        line.against or "-",
        _number(line.ours),
        _number(line.theirs),
        _number(line.ratio) if line.against else "-",
        spread,
        bar,
        met,
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
