"""The words of the documentation and licences of all installed packages, counted: tg.map, and a reduction.

    python examples/wordcount.py
    python examples/wordcount.py 8 progress

A piece is a batch of files, whose words a node counts; the caller adds the counts up. Pieces go to the nodes that are
free, and those of a node that dies go to others. The sum is that of `collections.Counter` in one process, on any
number of nodes.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import taskgraph as tg

SUFFIXES = {".txt", ".md", ".rst"}
NAMES = re.compile(r"licen[sc]e|copying|notice|readme|metadata|authors", re.IGNORECASE)
WORD = re.compile(r"[^\W\d_]+")
BATCH = 40


def texts() -> list[str]:
    """Returns the files with text of the packages that this Python has installed."""
    root = Path(sysconfig.get_path("purelib"))
    found = (path for path in root.rglob("*") if path.suffix in SUFFIXES or NAMES.match(path.name))
    return sorted(str(path) for path in found if path.is_file())


def count(paths: list[str]) -> dict[str, int]:
    """Returns how often each word is in these files."""
    words: Counter[str] = Counter()
    for path in paths:
        words.update(WORD.findall(Path(path).read_text("utf-8", errors="replace").lower()))
    return dict(words)


def counted(paths: list[str], nodes: int, *, progress: bool = False) -> Counter[str]:
    """Counts the words of all files on nodes of this host."""
    whole: Counter[str] = Counter()
    batches = [paths[at : at + BATCH] for at in range(0, len(paths), BATCH)]
    for _, words in tg.imap(count, batches, nodes=nodes, progress=progress):
        whole.update(words)
    return whole


if __name__ == "__main__":
    files = texts()
    began = time.perf_counter()
    found = counted(files, nodes=int(sys.argv[1]) if len(sys.argv) > 1 else 4, progress="progress" in sys.argv)
    took_s = time.perf_counter() - began
    alone = Counter(count(files))
    assert found == alone
    print(f"{found.total()} words in {len(files)} files, {len(found)} different ones, in {took_s:.1f} s")
    print(", ".join(f"{word} {number}" for word, number in found.most_common(10)))
