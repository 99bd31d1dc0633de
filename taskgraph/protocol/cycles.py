"""Finds deadlocks: cycles of waits in an epoch that makes no progress.

The leader asks all primaries what their unfinished processors wait for. A processor needs all of its waits, so a cycle
is a deadlock, made by the graph of the job.

An edge leads from a processor to the one that must act first:

    kind     edge to
    item     the unfinished processor of the producing task that will put this tag for this consumer
    order    the earlier processor of the same task
    reply    the handler of the called task, if it waits
    turn     none: the code that has the turn may return, or wait for a reply, at any time
    running  none
    outside  none: the primary waits for replicas, reports and so on, between calls of user code

A wait for a processor that is finished has no edge: its outcome is on its way.

Handlers are known by name, not by request. Each running handler was called by one request of one processor or handler,
so the calls form a forest, and handlers alone never wait in a cycle. But two handlers that call each other in turn look
like a cycle. So a cycle counts only if it contains a processor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from taskgraph.errors import first_lines
from taskgraph.protocol.messages import Wait

__all__ = ["HANDLER", "WaitEdge", "describe_cycle", "describe_waiter", "describe_waits", "find_cycle"]

HANDLER = "handler "  # prefix of the processor in the wait of a handler

_MAX_EDGES = 12  # the most edges of a cycle that are described


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """`processor` of `task` waits for `next_processor` of `next_task`; `kind` and `name` as in `messages.Wait`."""

    task: int
    processor: str
    kind: str
    name: str
    next_task: int
    next_processor: str


_Node = tuple[int, str]
_Edges = dict[_Node, list[WaitEdge]]


def find_cycle(waits: Mapping[int, Sequence[Wait]]) -> list[WaitEdge] | None:
    """Finds a cycle of waits with a processor in it, in linear time. A cycle of handlers alone does not count.

    Args:
        waits: task -> the waits of its unfinished processors and handlers. Missing tasks count as making progress.

    Returns:
        The consecutive edges of one cycle, or None.
    """
    edges = _collect_edges(waits)
    for component in _components(edges):
        processors = {node for node in component if not node[1].startswith(HANDLER)}
        if processors:
            # Starts at the first by task and declaration, so that the text is the same each time.
            return _shortest_cycle(edges, component, next(node for node in edges if node in processors))
    return None


def _collect_edges(waits: Mapping[int, Sequence[Wait]]) -> _Edges:
    """Returns (task, processor that waits) -> its edges; no edge leads to a processor that is finished or unknown."""
    edges: _Edges = {}
    provider: dict[tuple[int, str, int], str] = {}  # (producer, tag, consumer) -> processor
    for task, page in sorted(waits.items()):
        for wait in page:
            edges.setdefault((task, wait.processor), [])
            for tag, consumer in wait.provides:
                provider.setdefault((task, tag, consumer), wait.processor)
    for task, page in waits.items():
        for wait in page:
            to: _Node
            match wait.kind:
                case "item":
                    to = (wait.task, provider.get((wait.task, wait.name, task), ""))
                case "order":
                    to = (task, wait.name)
                case "reply":
                    to = (wait.task, HANDLER + wait.name)
                case _:
                    continue
            if to in edges:
                edges[task, wait.processor].append(WaitEdge(task, wait.processor, wait.kind, wait.name, *to))
    return edges


def _components(edges: _Edges) -> list[set[_Node]]:
    """Returns the strongly connected components with a cycle (Tarjan 1972, without recursion)."""
    index: dict[_Node, int] = {}
    low: dict[_Node, int] = {}
    stack: list[_Node] = []
    open_nodes: set[_Node] = set()
    found: list[set[_Node]] = []
    for root in edges:
        if root in index:
            continue
        path = [(root, iter(edges[root]))]
        while path:
            node, rest = path[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                open_nodes.add(node)
            for edge in rest:
                to = (edge.next_task, edge.next_processor)
                if to not in index:
                    path.append((to, iter(edges[to])))
                    break
                if to in open_nodes:
                    low[node] = min(low[node], index[to])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    component: set[_Node] = set()
                    while node not in component:
                        component.add(stack.pop())
                    open_nodes -= component
                    if len(component) > 1 or any((e.next_task, e.next_processor) == node for e in edges[node]):
                        found.append(component)
    return found


def _shortest_cycle(edges: _Edges, component: set[_Node], start: _Node) -> list[WaitEdge]:
    """Returns the edges of the shortest cycle through `start` within a component."""
    came_by: dict[_Node, WaitEdge] = {}
    queue = deque([start])
    while start not in came_by:
        for edge in edges[queue.popleft()]:
            to = (edge.next_task, edge.next_processor)
            if to in component and to not in came_by:
                came_by[to] = edge
                queue.append(to)
    cycle = [came_by[start]]
    while (node := (cycle[-1].task, cycle[-1].processor)) != start:
        cycle.append(came_by[node])
    cycle.reverse()
    return cycle


def describe_cycle(cycle: Sequence[WaitEdge]) -> str:
    """Describes a cycle, of its edges in order, and how to change the job."""
    parts = [_describe_edge(edge, cycle[i - 1]) for i, edge in enumerate(cycle)]
    if len(parts) > _MAX_EDGES:
        parts[_MAX_EDGES - 2 : -2] = [f"({len(parts) - _MAX_EDGES} more)"]
    if any(edge.kind == "order" for edge in cycle):
        out = (
            "Two ways out: declare the processors in another order, or parallel=True for one that shares no state "
            "with the others."
        )
    else:
        out = (
            "No order of the processors helps: split one of them in two, so that what it puts does not need what it "
            "waits for."
        )
    return f"{'; '.join(parts)}. {out}"


def _describe_edge(edge: WaitEdge, before: WaitEdge) -> str:
    will = f" (which will put {before.name!r})" if before.kind == "item" else ""
    wait = _describe_wait(edge.kind, edge.processor, edge.name, edge.next_task)
    return f"task {edge.task} {describe_waiter(edge.processor)}{will} {wait}"


def describe_waiter(processor: str) -> str:
    """Describes the waiting processor or handler of a `Wait`; "" if it is "": then the primary waits, not user code."""
    if not processor:
        return ""
    return f"handler {processor[len(HANDLER) :]!r}" if processor.startswith(HANDLER) else repr(processor)


def _describe_wait(kind: str, processor: str, name: str, task: int) -> str:
    match kind:
        case "item":
            return f"waits for {name!r} from task {task}"
        case "order":
            return f"runs after {name!r} of the same task"
        case "reply":
            return f"awaits the reply of task {task} to {name!r}"
        case "turn":
            return f"waits for its turn: {describe_waiter(name)} runs"
        case "turn of asking":
            return (
                f"waits for its turn: {describe_waiter(name)} runs, which has asked for replies; where threads of its "
                f"own wait for them, have it send all requests first, and then call wait() itself"
            )
        case "outside":
            return f"waits for {name}"
        case "running":
            return "is running" if name in ("", processor) else f"is not released ({name})"  # a hold
        case _:
            return f"waits for {kind} {name!r} of task {task}"


def describe_waits(waits: Mapping[int, Sequence[Wait]], limit: int = 200) -> list[str]:
    """Describes waits, equal ones in one line: `task 3 'add' waits for 'gradient' from task 5, 2.3 s`.

    Waits for no other task come first, then the waits for those tasks, and so on: the likely causes are on top.

    Args:
        waits: task -> its waits.
        limit: the most lines; a last line counts the rest.
    """
    steps = _distances(waits)
    found: dict[tuple[float, int, str], list[float]] = {}  # equal waits, as of many requests
    for task, page in sorted(waits.items()):
        for w in page:
            wait = _describe_wait(w.kind, w.processor, w.name, w.task)
            text = f"task {task}{' ' * bool(w.processor)}{describe_waiter(w.processor)} {wait}"
            found.setdefault((_distance(w, task, steps), task, text), []).append(w.since_s)
    lines = [
        f"{text}{f' ({len(since)} times)' * (len(since) > 1)}, {max(since):.1f} s"
        for (_, _, text), since in sorted(found.items(), key=lambda each: each[0][:2])
    ]
    return first_lines(lines, limit)


_OTHER_TASK_KINDS = ("item", "reply")  # kinds of waits for another task


def _distances(waits: Mapping[int, Sequence[Wait]]) -> dict[int, int]:
    """Returns task -> the fewest waits from it to a task that waits for no other task, or whose waits are unknown."""
    waiting: dict[int, list[int]] = {}  # task -> the tasks that wait for it
    for task, page in waits.items():
        for w in page:
            if w.kind in _OTHER_TASK_KINDS:
                waiting.setdefault(w.task, []).append(task)
    moving = [task for task, page in waits.items() if any(w.kind not in (*_OTHER_TASK_KINDS, "order") for w in page)]
    steps = dict.fromkeys([*moving, *(waiting.keys() - waits.keys())], 0)
    queue = deque(steps)
    while queue:
        at = queue.popleft()
        for task in waiting.get(at, ()):
            if task not in steps:
                steps[task] = steps[at] + 1
                queue.append(task)
    return steps


def _distance(wait: Wait, task: int, steps: Mapping[int, int]) -> float:
    """Returns the number of waits from a wait of `task` to its likely cause: 0 if the wait is for no other task; inf if
    no cause is known.

    Args:
        steps: the result of `_distances`.
    """
    if wait.kind == "order":
        return 1 + steps.get(task, inf)
    return 1 + steps.get(wait.task, inf) if wait.kind in _OTHER_TASK_KINDS else 0
