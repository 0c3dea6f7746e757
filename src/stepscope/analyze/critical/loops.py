"""The passes over the graph that cannot be written as array operations.

Plain enough to be compiled (`stepscope.analyze.native.critical`); they run on lists too, which is faster than loading
the compiler where the graph is small.
"""

from __future__ import annotations

from typing import Any

UNREACHED = -(1 << 62)
"""The time of a node that nothing leads to."""


def emit_points(thread: Any, parent: Any, points: Any, stack: Any) -> int:
    """Starts (2·place) and ends (2·place + 1) in the order in which nested events begin and end.

    Rows come by thread, start, longest first; `parent` is a place or −1. Returns how many points were written: all.
    """
    depth = 0
    count = 0
    for place in range(len(thread)):
        new_thread = place > 0 and thread[place] != thread[place - 1]
        while depth > 0 and (new_thread or stack[depth - 1] != parent[place]):
            depth -= 1
            points[count] = 2 * stack[depth] + 1
            count += 1
        stack[depth] = place
        depth += 1
        points[count] = 2 * place
        count += 1
    while depth > 0:
        depth -= 1
        points[count] = 2 * stack[depth] + 1
        count += 1
    return count


def group_edges(key: Any, first: Any, order: Any) -> int:
    """Fill `order` with the edges sorted by their key, in their old order where keys are equal.

    `first` is zeros, one more than there are keys; afterwards those of key k end at `first[k]`.
    """
    for edge in range(len(key)):
        first[key[edge] + 1] += 1
    for place in range(len(first) - 1):
        first[place + 1] += first[place]
    for edge in range(len(key)):
        order[first[key[edge]]] = edge
        first[key[edge]] += 1
    return len(key)


def order_nodes(followers: Any, first: Any, waiting: Any, queue: Any) -> int:
    """Fill `queue` with nodes so that each comes after its predecessors; returns how many came.

    `followers` are the targets of all edges, those of node n from `first[n]` to `first[n + 1]`; `waiting` is how many
    edges lead to each node. If not all nodes came, the rest lies on or behind a cycle; `waiting` is above 0 for these.
    """
    head = 0
    tail = 0
    for node in range(len(queue)):
        if waiting[node] == 0:
            queue[tail] = node
            tail += 1
    while head < tail:
        node = queue[head]
        head += 1
        for after in followers[first[node] : first[node + 1]]:
            left = waiting[after] - 1
            waiting[after] = left
            if left == 0:
                queue[tail] = after
                tail += 1
    return tail


def pass_forward(source: Any, target: Any, weight: Any, time: Any, binding: Any) -> int:
    """Earliest times: `time` begins as UNREACHED but for the first node.

    `binding` gets the edge that decided, the first of equals. Edges into a node come after those into its predecessors.
    """
    for edge, (before, after, delay) in enumerate(zip(source, target, weight)):  # noqa: B905  # numba has no strict
        reached = time[before] + delay
        if reached > time[after]:
            time[after] = reached
            binding[after] = edge
    return len(source)


def pass_backward(source: Any, target: Any, weight: Any, latest: Any) -> int:
    """Latest times that leave the end where it is: `latest` begins as the end everywhere."""
    for before, after, delay in zip(source[::-1], target[::-1], weight[::-1]):  # noqa: B905  # numba has no strict
        limit = latest[after] - delay
        if limit < latest[before]:  # noqa: PLR1730  # as a call of min it is slower
            latest[before] = limit
    return len(source)


def walk_back(source: Any, binding: Any, last: int, edges: Any) -> int:
    """Binding edges from `last` back to the node that has none; returns how many."""
    count = 0
    edge = binding[last]
    while edge >= 0:
        edges[count] = edge
        edge = binding[source[edge]]
        count += 1
    return count
