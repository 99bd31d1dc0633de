"""An embedded etcd whose data, or whose port, outlives it; or one that is told more than ours are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.public import durability_options


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
        keeping = durability_options(self.version) if self._data is not None else []
        return [*command, *keeping, *self._arguments]
