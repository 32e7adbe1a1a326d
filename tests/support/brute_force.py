"""Every solution of a small search problem by enumeration, and small random problems."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np

from partition.search.best import Solution
from partition.search.problem import Array, Group, Problem


def priced(problem: Problem, groups: Sequence[int], cuts: Sequence[int]) -> Solution | None:
    """Price stages on these groups, cut there, by the definition. None: it is not possible."""
    first, last = problem.groups[groups[0]], problem.groups[groups[-1]]
    parts = [first.enter, last.leave]
    parts += [problem.groups[g].stage[:, i, j] for g, (i, j) in zip(groups, pairwise(cuts), strict=True)]
    parts += [problem.hop(a, b)[:, cut] for (a, b), cut in zip(pairwise(groups), cuts[1:-1], strict=True)]
    measures = np.array(parts)
    whole = np.append(measures[:, : problem.adding].sum(axis=0), measures[:, problem.adding :].max(axis=0))
    if not np.isfinite(whole).all():
        return None
    objectives = problem.objectives(whole[:, None])[:, 0]
    if problem.caps is not None and (objectives > problem.caps).any():
        return None
    count = sum(len(problem.groups[g].members) for g in groups)
    return Solution(tuple(groups), tuple(cuts), tuple(whole.tolist()), tuple(objectives.tolist()), count)


def solutions(problem: Problem) -> Iterator[Solution]:
    """All that are possible: every sequence of groups without a common device, with every choice of cuts."""

    def sequences(so_far: tuple[int, ...], used: frozenset[int]) -> Iterator[tuple[int, ...]]:
        if so_far:
            yield so_far
        if len(so_far) < problem.n:
            for g, group in enumerate(problem.groups):
                if not used & set(group.members):
                    yield from sequences((*so_far, g), used | set(group.members))

    for chosen in sequences((), frozenset()):
        for inner in combinations(range(1, problem.n), len(chosen) - 1):
            solution = priced(problem, chosen, (0, *inner, problem.n))
            if solution:
                yield solution


def devices(problem: Problem, solution: Solution) -> int:
    """Return how many devices it uses."""
    return sum(len(problem.groups[g].members) for g in solution.groups)


def front(problem: Problem) -> dict[tuple[float, ...], int]:
    """The non-dominated objective vectors, and the fewest devices that reach each."""
    fewest: dict[tuple[float, ...], int] = {}
    for solution in solutions(problem):
        count = devices(problem, solution)
        fewest[solution.objectives] = min(fewest.get(solution.objectives, count), count)
    # Whatever dominates a vector comes before it in this order.
    results: list[tuple[float, ...]] = []
    for item in sorted(fewest):
        if not any(all(a <= b for a, b in zip(other, item, strict=True)) for other in results):
            results.append(item)
    return {entry: fewest[entry] for entry in results}


def small_problem(rng: np.random.Generator) -> Problem:
    """Up to 7 blocks on up to 4 devices, alone and in groups; costs are whole numbers, so many are equal."""
    n, many = int(rng.choice(7, p=[0.05, 0.1, 0.25, 0.3, 0.2, 0.06, 0.04])) + 1, int(rng.integers(1, 5))
    measures = [(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 0), (0, 1)][rng.integers(7)]
    top = int(rng.choice([2, 5, 20]))
    impossible = float(rng.choice([0, 0.1, 0.3]))  # stages for want of memory, and hops

    def costs(*shape: int, never: float = 0.0) -> Array:
        """Sums and peaks, both possible or neither."""
        out = rng.random(shape) < never
        return np.concatenate([np.where(out, np.inf, rng.integers(0, top + 1, (kind, *shape))) for kind in measures])

    work = np.cumsum(rng.integers(0, top + 1, n + 1))
    adds_up = rng.random() < 0.6  # stages take their blocks' work, and a little; else anything

    def stages() -> Array:
        slowness = rng.integers(1, 5)
        result = costs(n + 1, n + 1, never=impossible)
        return np.triu(work - work[:, None]) * slowness + result if adds_up else result

    together = [group for size in range(2, many + 1) for group in combinations(range(many), size)]
    members = [(device,) for device in range(many)] + [group for group in together if rng.random() < 0.5]
    groups = tuple(
        Group(group, stages(), costs(never=impossible / 2), costs(never=impossible / 2)) for group in members
    )
    hops = costs(len(groups), len(groups), n + 1, never=impossible / 2)
    expected = int(rng.choice([1, 2, 2, 2, 3, 4]))
    weights = (
        np.eye(5)[:expected, : sum(measures)] if rng.random() < 0.5 else rng.integers(0, 3, (expected, sum(measures)))
    )
    of_sums, of_peaks = weights[:, : measures[0]], weights[:, measures[0] :]
    larger = rng.random(expected) < 0.3

    def objectives(values: Array) -> Array:
        a, b = of_sums @ values[: measures[0]], of_peaks @ values[measures[0] :]
        return np.where(larger[:, None], np.maximum(a, b), a + b)

    caps = rng.integers(1, 8 * top, expected).astype(float) if rng.random() < 0.1 else None
    return Problem(n, measures[0], groups, lambda a, b: hops[:, a, b], objectives, caps)
