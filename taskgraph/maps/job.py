"""What the workers of a map run: an elastic job that deals pieces, and writes each result before its piece counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from taskgraph.elastic_jobs.job import elastic
from taskgraph.elastic_jobs.run import Run
from taskgraph.elastic_jobs.shards import Pieces
from taskgraph.errors import PieceFailed
from taskgraph.graph.values import encode
from taskgraph.maps.functions import find_function
from taskgraph.maps.records import AtWorkFile, MapRecord, PieceFile, RecordKind, RecordWriter
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.dealing import QueueLedger

__all__ = ["map_pieces"]


@elastic(name="map")
def map_pieces(run: Run, folder: str, call: str, function: str, attempts: int, on_error: str) -> int:
    """Computes the pieces of a map that a call has yet to compute. Returns how many there were.

    Args:
        folder: the map's folder (`journal`).
        call: the name of the call, in file names.
        function: names the function (`functions.find_function`).
        attempts, on_error: as of `tg.map`.
    """
    compute, pieces = find_function(function), PieceFile(Path(folder))
    todo = np.load(Path(folder) / f"todo-{call}.npy")
    ledger = QueueLedger(len(todo), attempts=attempts, on_error=on_error)
    writer = RecordWriter(Path(folder) / f"{call}-{run.worker}.results")
    at_work = AtWorkFile(Path(folder) / f"{call}-{run.worker}.at")
    dealt = Pieces(run, ledger, f"tg.map {call}", numbers=todo, keep=writer.flush)
    try:
        while (ticket := dealt.next()) is not None:
            number = int(todo[ticket.piece])
            at_work.note(number)
            try:
                value = encode(compute(pieces[number]), what=f"the result of piece {number} of the map")
            except (Exception, SystemExit) as error:
                text = UserCodeError("", error).traceback_text
                said = encode({"node": run.worker, "traceback": text})
                writer.write(MapRecord(RecordKind.ERROR, number, ticket.attempt, said))
                dealt.fail(error)
            else:
                writer.write(MapRecord(RecordKind.RESULT, number, ticket.attempt, value))
                dealt.finish()
    except PieceFailed as failed:
        said = encode({"node": failed.node, "traceback": failed.traceback})
        writer.write(MapRecord(RecordKind.FAILED, failed.piece, 0, said))
        raise
    finally:
        at_work.note(-1)
        writer.close()
    return len(todo)
