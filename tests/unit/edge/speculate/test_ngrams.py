"""Test drafts from the text: they equal the definition for any text, and a copied passage is followed to its end."""

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edge.speculate.ngrams import _MOST_PLACES, LEAST, LONGEST, NgramDrafts

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def drafts(text: Sequence[int]) -> NgramDrafts:
    """That took in a text in pieces."""
    result = NgramDrafts()
    result.begin(text[: len(text) // 2])
    for token in text[len(text) // 2 :]:
        result.extend([token])
    return result


def by_definition(text: Sequence[int], n: int, assumed: Sequence[int]) -> list[int]:
    """Draft from the place where most is the same, among the last places behind the last two tokens."""
    whole = [*text, *assumed]
    places = [i for i in range(len(text) - 1, LEAST - 1, -1) if text[i - LEAST : i] == whole[-LEAST:]][:_MOST_PLACES]
    results = {}
    for place in places:
        equal = (a == b for a, b in zip(reversed(text[:place]), reversed(whole), strict=False))
        results[place] = sum(1 for _ in itertools.takewhile(bool, equal))
    best = max(results, key=results.__getitem__, default=0)
    following = [*text[best : best + n], *assumed]
    return [following[i % len(following)] for i in range(n)] if best else []


@given(TEXTS, st.integers(1, 9), TEXTS)
def test_it_is_what_followed_where_most_was_the_same(text: list[int], n: int, assumed: list[int]) -> None:
    assert drafts(text).draft(n, assumed) == by_definition(text, n, assumed)


def test_a_copy_is_followed_where_its_words_repeat() -> None:
    """Where four tokens stand at several places, those before them tell which one it is."""
    chosen = random.Random(1)
    text = [9, 8, *(chosen.choice([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 4, 7)]) for _ in range(8))]
    words = [token for part in text for token in (part if isinstance(part, tuple) else (part,))]
    copied = NgramDrafts()
    copied.begin([*words, 0, *words[:2]])
    for place in range(2, len(words)):
        assert copied.draft(1) == [words[place]]
        copied.extend([words[place]])


def test_a_copy_with_its_own_words_is_followed_behind_each() -> None:
    words = [*range(100, 140)]
    copied = NgramDrafts()
    copied.begin([*words, 0, *words[:10]])
    right = []
    for place in range(10, len(words)):
        right.append(copied.draft(1) == [words[place]])
        copied.extend([1 if place % 4 == 1 else words[place]])
    assert all(right)


def test_a_text_that_goes_elsewhere_is_left_behind() -> None:
    copied = NgramDrafts()
    copied.begin([*range(100, 140), *range(100, 110)])
    assert copied.draft(2) == [110, 111]
    for token in (1, 2, 3):
        copied.extend([token])
        last = copied.draft(2)
    assert last == []


def test_what_is_the_same_for_longer_goes_before_where_the_last_draft_would_go_on() -> None:
    first = [*range(100, 120)]
    second = [*first[1:15], 9, *first[16:], 8]
    copied = NgramDrafts()
    copied.begin([*first, 7, *second, 6, *first[:15]])
    assert copied.draft(1) == [first[15]]
    for token in second[14:-1]:
        copied.extend([token])
        last = copied.draft(1)
    assert last == [8]  # 19 tokens are the same there; here 19, less 2 for the one that differs


def test_a_short_copy_is_left_at_the_first_token_that_differs() -> None:
    copied = NgramDrafts()
    copied.begin([*range(100, 140), *range(100, 105)])
    assert copied.draft(1) == [105]
    copied.extend([1])
    assert copied.draft(1) == []


def test_what_differs_far_back_does_not_count_against_a_place() -> None:
    """Nor does what was the same before it: of two places the one wins that is the same for longer now."""
    copied = NgramDrafts()
    copied.begin([1, 2, 3, 4, 9, 5, 6, 77, 8, 4, 5, 6, 88, 1, 2, 3, 4, 0, 5, 6])
    assert copied.draft(1) == [88]


def test_a_draft_takes_no_longer_in_a_long_text() -> None:
    class Counted(list[int]):
        looked_at = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Counted.looked_at += 1
            return super().__getitem__(at)

    text = drafts([0] * 20_000)
    text._tokens = Counted(text._tokens)
    assert text.draft(4) == [0] * 4
    assert Counted.looked_at <= (_MOST_PLACES + 1) * LONGEST + 2
