"""Services: tasks that a job has beside those of the user, such as the servers of a table or the dealer of a queue.

    ids    0 ... tasks - 1          the user's: what topologies, `self.tasks` and collectives know
           tasks ... all_tasks - 1  services, in the order in which the job names them

A service is made of ordinary tasks: they have backups, take part in each epoch, commit and take over as all tasks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from taskgraph.errors import JobError
from taskgraph.protocol.keys import NAME_RULE, is_name

if TYPE_CHECKING:
    from taskgraph.task import Task

__all__ = ["Servable", "Service", "check_servables", "ids_of"]


@dataclass(frozen=True, slots=True)
class Service:
    """The tasks of one service.

    Attributes:
        title: for messages and `status`, such as "table users".
        count: how many tasks it has.
        build: makes one of them, from its index within the service.
    """

    title: str
    count: int
    build: Callable[[int], Task]


@runtime_checkable
class Servable(Protocol):
    """The interface of the objects that a job names in `tables` or `queues`."""

    def service(self, name: str, tasks: int) -> Service:
        """Returns the service that this table or queue needs.

        Args:
            name: what the job calls it.
            tasks: how many tasks of the user the job has.
        """


def check_servables(field: str, given: Any, kind: str) -> dict[str, Servable]:
    """Checks what `Job(tables=...)` or `Job(queues=...)` got, and returns it as a dict.

    Args:
        field: "tables" or "queues".
        kind: the class that its values have, for the message.

    Raises:
        JobError: `given` is no mapping of names to such objects.
    """
    if not isinstance(given, Mapping):
        raise JobError(f"Job({field}={given!r:.100}): must be a dict of names, as in {{'name': {kind}(...)}}")
    for name, one in given.items():
        if not isinstance(name, str) or not is_name(name):
            raise JobError(f"Job({field}={{{name!r}: ...}}): {NAME_RULE}")
        if not isinstance(one, Servable):
            raise JobError(f"Job({field}={{{name!r}: ...}}): must be a {kind}(...), not {type(one).__name__}")
    return dict(given)


def ids_of(services: Iterable[Service], tasks: int) -> dict[str, tuple[int, ...]]:
    """Returns the task ids of each service, by its title. They follow those of the user's `tasks`."""
    found, at = {}, tasks
    for service in services:
        found[service.title] = tuple(range(at, at + service.count))
        at += service.count
    return found
