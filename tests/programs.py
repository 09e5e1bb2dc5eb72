"""What a compiled program communicates, and in which order its data put that."""

import re

from launch.run import cost

KINDS = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"


def _computations(text):
    """{computation: {operation: (its kind, the names that it mentions)}}."""

    def operation(line):
        name, said = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*)", line).groups()
        kind = re.search(r"(?:^|[\s})\]])([a-z][\w-]*)\(", said)
        return name, (kind[1] if kind else "", set(re.findall(r"%([\w.-]+)", said)))

    _, bodies = cost.computations(text)
    return {name: dict(map(operation, lines)) for name, lines in bodies.items()}


def beside_loops(text):
    """Pairs of operations that communicate, one a loop or branch, in no order.

    XLA's CPU waits for a loop only where its result is used, and two that communicate
    at once may wait for each other's threads.
    """
    every, known = _computations(text), {}

    def communicates(name):
        if name not in known:
            known[name] = False  # no computation calls itself
            known[name] = any(
                kind in KINDS or any(n in every and communicates(n) for n in names)
                for kind, names in every[name].values()
            )
        return known[name]

    def before(operations, name):
        found, left = set(), [name]
        while left:
            new = (operations[left.pop()][1] & operations.keys()) - found
            found |= new
            left += new
        return found

    pairs = []
    for operations in every.values():
        loops = [
            name
            for name, (_, names) in operations.items()
            if any(n in every and communicates(n) for n in names)
        ]
        others = [name for name, (kind, _) in operations.items() if kind in KINDS]
        earlier = {name: before(operations, name) for name in (*loops, *others)}
        pairs += [
            (one, other)
            for number, one in enumerate(loops)
            for other in (*loops[number + 1 :], *others)
            if one not in earlier[other] and other not in earlier[one]
        ]
    return pairs
