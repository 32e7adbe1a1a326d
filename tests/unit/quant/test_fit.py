"""Test types for a budget: as good as an enumeration, never above the budget, and filling it if possible."""

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quant.errors import DoesNotFit
from quant.fit import LEAST_FILL, Choice, fit, undominated
from quant.types import TYPES
from tests.support.thorough import some

KINDS = [TYPES[name] for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")]

Table = dict[str, list[Choice]]


def choices(most_bytes: int) -> st.SearchStrategy[list[Choice]]:
    sizes = st.integers(1, most_bytes)
    damages = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
    first = st.tuples(sizes, damages)
    return st.lists(first, min_size=1, max_size=5).map(
        lambda pairs: [Choice(kind, *pair) for kind, pair in zip(KINDS, pairs, strict=False)]
    )


def tables(most_bytes: int = 1000, most_tensors: int = 5) -> st.SearchStrategy[Table]:
    rows = st.lists(choices(most_bytes), min_size=1, max_size=most_tensors)
    return rows.map(lambda rows: {f"tensor {i}": row for i, row in enumerate(rows)})


def least(table: Mapping[str, Sequence[Choice]]) -> int:
    return sum(min(choice.n_bytes for choice in row) for row in table.values())


def best(table: Mapping[str, Sequence[Choice]], budget: int, reserved: int) -> float:
    """The least damage that can be, by trying everything: among what fills the budget, or else among what fits."""
    results = {True: math.inf, False: math.inf}
    for chosen in itertools.product(*(undominated(row) for row in table.values())):
        n_bytes = sum(choice.n_bytes for choice in chosen) + reserved
        if n_bytes <= budget:
            fills = n_bytes > int(LEAST_FILL * budget)
            results[fills] = min(results[fills], sum(choice.damage for choice in chosen))
    return results[True] if results[True] < math.inf else results[False]


@settings(max_examples=some(37, 150))
@given(tables(), st.floats(0, 1.1), st.integers(0, 2000))
def test_it_is_as_good_as_trying_everything(table: Table, part: float, reserved: int) -> None:
    most = sum(max(choice.n_bytes for choice in row) for row in table.values())
    budget = reserved + least(table) + int(part * (most - least(table)))
    result = fit(table, budget, reserved)
    assert result.choices.keys() == table.keys()
    assert all(choice in table[name] for name, choice in result.choices.items())
    assert result.n_bytes == sum(choice.n_bytes for choice in result.choices.values())
    assert result.n_bytes + reserved <= budget
    expected = best(table, budget, reserved)
    largest = {name: undominated(row)[-1] for name, row in table.items()}
    if result.choices == largest:
        expected = min(expected, result.damage)  # nothing is better, whether or not it fills
    assert 0 <= result.gap < 0.01
    assert result.damage <= expected * (1 + 2 * result.gap + 1e-6) + 1e-9


@settings(max_examples=some(25, 100))
@given(tables(most_bytes=1 << 22), st.data())
def test_models_of_gigabytes_keep_to_the_byte(rows: Table, data: st.DataObject) -> None:
    """Budgets are just below what some choice takes: a solver's tolerance must not matter."""
    table = {n: [Choice(c.type, 32 * c.n_bytes, c.damage) for c in row] for n, row in rows.items()}
    expected = sum(data.draw(st.sampled_from(undominated(row))).n_bytes for row in table.values())
    budget = max(least(table), expected - data.draw(st.integers(0, 2000)))
    result = fit(table, budget)
    assert result.n_bytes <= budget
    if any(result.choices[name] != undominated(row)[-1] for name, row in table.items()):
        assert result.damage <= best(table, budget, 0) * (1 + 2 * result.gap + 1e-6) + 1e-9


@settings(max_examples=some(25, 100))
@given(tables(most_bytes=1 << 38, most_tensors=12), st.floats(0, 1))
def test_nothing_is_too_large(table: Table, part: float) -> None:
    most = sum(undominated(row)[-1].n_bytes for row in table.values())
    budget = least(table) + int(part * (most - least(table)))
    assert fit(table, budget).n_bytes <= budget


@settings(max_examples=some(20, 50))
@given(tables(), st.integers(0, 2000), st.integers(1, 5000))
def test_what_does_not_fit_says_the_least(table: Table, reserved: int, short: int) -> None:
    need = least(table) + reserved
    assume(need - short > 0)
    with pytest.raises(DoesNotFit) as raised:
        fit(table, need - short, reserved)
    assert raised.value.least == need
    assert fit(table, need, reserved).n_bytes + reserved == need


@given(choices(1000))
def test_undominated(row: list[Choice]) -> None:
    saved = undominated(row)
    assert all(choice in row for choice in saved)
    for first, other in itertools.pairwise(saved):
        assert first.n_bytes < other.n_bytes
        assert first.damage > other.damage
    for choice in row:
        assert any(other.n_bytes <= choice.n_bytes and other.damage <= choice.damage for other in saved)


def test_a_budget_is_filled_where_less_would_do_no_more_harm() -> None:
    """Types that are larger and worse are not taken to fill it, better ones are."""
    small, large, worse = Choice(KINDS[0], 400, 0.5), Choice(KINDS[2], 500, 0.5 - 1e-9), Choice(KINDS[1], 499, 0.6)
    table = {f"{i}": [small, large, worse] for i in range(4)}
    assert {choice.n_bytes for choice in fit(table, 2000).choices.values()} == {500}
    result = fit(table, 1802)
    assert (result.n_bytes, result.gap) == (1800, pytest.approx(0, abs=1e-3))
    assert worse not in result.choices.values()


def test_a_model_of_hundreds_of_tensors_is_solved_to_the_gap() -> None:
    """As of 7e9 weights: damages fall fourfold a bit, and differ by layer."""
    table = {}
    for i in range(224):
        n = 4096 * (4096, 11008)[i % 2]
        harm = (1 + i % 7) * 1e-3 * 1.01**i
        table[f"{i}"] = [Choice(k, k.n_bytes(n), harm * 4.0**-k.bits_per_weight) for k in KINDS]
    smallest, largest = (sum(row[i].n_bytes for row in table.values()) for i in (0, -1))
    for part in (0.2, 0.5, 0.8):
        budget = int(smallest + part * (largest - smallest))
        result = fit(table, budget)
        assert LEAST_FILL * budget < result.n_bytes <= budget
        assert result.gap <= 1e-4
        uniform = [sum(row[i].damage for row in table.values()) for i in range(5)]
        sizes = [sum(row[i].n_bytes for row in table.values()) for i in range(5)]
        assert result.damage < min(d for d, n in zip(uniform, sizes, strict=True) if n <= budget)
