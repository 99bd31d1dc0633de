"""An embedded etcd whose data, or whose port, outlives it; or one that is told more than ours are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from taskgraph.coordination.embedded import EmbeddedEtcd


class KeptEtcd(EmbeddedEtcd):
    """The same, as one that is to be started again needs it.

    Args:
        data: where to keep data across restarts; None: as others do.
        port: the port for clients; 0: a free one.
        arguments: further command line arguments for etcd.
    """

    def __init__(
        self, data: Path | None = None, *, port: int = 0, private: bool = False, arguments: Sequence[str] = ()
    ) -> None:
        super().__init__(private=private)
        self._data = data
        self._port = port
        self._arguments = tuple(arguments)

    def _addresses(self, folder: Path) -> tuple[str, str, str]:
        client_url, peer_url, endpoint = super()._addresses(folder)
        if self._port:
            endpoint = f"127.0.0.1:{self._port}"
            client_url = f"http://{endpoint}"
        return client_url, peer_url, endpoint

    def _command(self, binary: Path, name: str, data: Path, client_url: str, peer_url: str) -> list[str]:
        command = super()._command(binary, name, self._data or data, client_url, peer_url)
        keeping = keeping_options(self.version) if self._data is not None else []
        return [*command, *keeping, *self._arguments]


def keeping_options(version: str) -> list[str]:
    """What etcd needs in order to find all that it has acknowledged when it starts again after SIGKILL.

    etcd 3.5.0 to 3.5.2 may write to its store that an entry of the log was applied before it is (etcd's issue 13766):
    killed just then, it never applies it, and a member of a cluster disagrees with the others from then on. So the
    store is written when the log is cut, and not ten times a second: etcd applies all of the log since then again.
    """
    if not (3, 5, 0) <= tuple(int(part) for part in version.split(".")[:3]) < (3, 5, 3):
        return []
    return ["--backend-batch-interval", "1h", "--backend-batch-limit", "1000000"]
