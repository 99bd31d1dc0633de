"""Sources: what a job reads, as pieces that each node can read alone.

    pieces()    ──►  values that travel: the same on every node, in a fixed order
    read(piece) ──►  the rows of a piece, one after another

Any object with these two methods is a source. `reading` has what all consumers need: values as a source, the seeded
order of pieces, rows shuffled within a buffer. `locations` finds and opens files; `text`, `delimited` and `parquet`
read lines, CSV and Parquet. Packages that only some sources need are imported when a source uses them.
"""

from taskgraph.sources.delimited import csv
from taskgraph.sources.locations import files
from taskgraph.sources.parquet import parquet
from taskgraph.sources.reading import Source, Values, as_source, content_of, is_source, pass_order, pieces_of, rows_of
from taskgraph.sources.text import lines

__all__ = [
    "Source",
    "Values",
    "as_source",
    "content_of",
    "csv",
    "files",
    "is_source",
    "lines",
    "parquet",
    "pass_order",
    "pieces_of",
    "rows_of",
]
