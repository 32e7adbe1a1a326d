"""Test the hidden states of the last tokens: each belongs to the token at its position, and they are contiguous."""

from typing import Any

import numpy as np
import pytest

from edge.speculate.hidden_states import MOST_TOKENS, HiddenStates
from edge.speculate.speculation import FEW
from tests.support.thorough import some

N_EMBD = 3


def state(token: int, position: int) -> list[float]:
    """One that names what it is of."""
    return [token, position, 1.0]


def add(states: HiddenStates, sequences: list[int], tokens: list[int], positions: list[int]) -> None:
    rows = np.array([state(*both) for both in zip(tokens, positions, strict=True)], np.float32)
    own, at, whose = (np.array(values, np.int32) for values in (tokens, positions, sequences))
    states.add(own, at, whose, rows)


@pytest.mark.parametrize("seed", range(some(6, 60)))
def test_they_are_of_the_text_and_reach_as_far_back_as_they_can(seed: int) -> None:
    """Texts of some sequences go on, are cut, copied, restored and shifted, of which nobody tells."""
    rng = np.random.default_rng(seed)
    states, most = HiddenStates(N_EMBD, most=24), 24
    texts: dict[int, list[int]] = {0: [], 1: []}
    current: dict[int, dict[int, int]] = {0: {}, 1: {}}  # tokens by position, of what was computed in a row
    for _ in range(200):
        sequence = int(rng.integers(2))
        text = texts[sequence]
        what = rng.integers(6)
        if what == 0:
            del text[int(rng.integers(len(text) + 1)) :]
        elif what == 1:  # restored: nobody computes it
            text += rng.integers(0, 4, 5).tolist()
        elif what == 2:
            texts[sequence] = text = list(texts[1 - sequence])
        elif what == 3 and len(text) > 4:
            del text[1:3]
        new = rng.integers(0, 4, int(rng.integers(1, 7))).tolist()
        at = range(len(text), len(text) + len(new))
        add(states, [sequence] * len(new), new, list(at))
        own = current[sequence]
        if at.start - 1 not in own:
            own.clear()
        current[sequence] = {p: token for p, token in own.items() if p < at.start} | dict(zip(at, new, strict=True))
        text += new
        start = int(rng.integers(len(text)))
        request = np.array([*text[start:], 9], np.int32)
        first, rows = states.behind(sequence, request, start)
        assert first + len(rows) == len(text)
        assert rows.tolist() == [state(text[p], p) for p in range(first, len(text))]
        longest = first
        while longest - 1 >= start and current[sequence].get(longest - 1) == text[longest - 1]:
            longest -= 1
        assert first == longest or len(rows) >= min(most // 2, len(text) - start)


def test_none_are_known_behind_what_was_not_computed() -> None:
    states = HiddenStates(N_EMBD)
    add(states, [0] * 4, [1, 2, 3, 4], [0, 1, 2, 3])
    for text, start in (([1, 2, 3, 4, 5, 6], 0), ([1, 2, 3, 7, 5], 0), ([5], 4), ([9], 0)):
        first, rows = states.behind(0, np.array(text, np.int32), start)
        assert (first, len(rows)) == (start + len(text) - 1, 0)
    assert states.behind(1, np.array([1, 2], np.int32), 0)[0] == 1
    first, rows = states.behind(0, np.array([3, 4, 5], np.int32), 2)
    assert (first, rows.tolist()) == (2, [state(3, 2), state(4, 3)])


def test_a_long_prompt_is_held_at_its_end() -> None:
    states = HiddenStates(N_EMBD)
    n = 3 * MOST_TOKENS
    tokens = [i % 7 for i in range(n)]
    add(states, [0] * n, tokens, list(range(n)))
    first, rows = states.behind(0, np.array([*tokens, 1], np.int32), 0)
    assert (first, len(rows)) == (n - MOST_TOKENS, MOST_TOKENS)
    assert HiddenStates.most_bytes(N_EMBD, 99) == FEW * HiddenStates.most_bytes(N_EMBD, 1) >= FEW * rows.nbytes


def test_many_sequences_have_none() -> None:
    """No request has drafts then; and of those that come one after the other, the last few have some."""
    states = HiddenStates(N_EMBD)
    many = list(range(FEW + 1))
    add(states, many, [1] * len(many), [0] * len(many))
    assert not any(len(states.behind(item, np.array([1, 2], np.int32), 0)[1]) for item in many)
    for item in many:
        add(states, [item], [1], [0])
    assert [len(states.behind(entry, np.array([1, 2], np.int32), 0)[1]) for entry in many] == [0, *[1] * FEW]


def test_one_thread_at_a_time_looks_up_and_adds() -> None:
    """Groups of sequences add theirs in threads of their own, and drafts are made in another."""
    states, locked = HiddenStates(N_EMBD), list[bool]()

    class Watched(dict[int, Any]):
        def get(self, *args: Any) -> Any:
            locked.append(states._lock.locked())
            return super().get(*args)

        def pop(self, *args: Any) -> Any:
            locked.append(states._lock.locked())
            return super().pop(*args)

    states._stretches = Watched()
    for sequence in range(FEW + 1):
        add(states, [sequence], [1], [0])
        assert len(states.behind(sequence, np.array([1, 2], np.int32), 0)[1]) == 1
    assert locked == [True] * (2 * (FEW + 1) + 1)
    assert not states._lock.locked()
