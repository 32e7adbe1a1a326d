"""The demonstration grammar: the same for a seed, right, and with questions that training never sees."""

import random
import re
from itertools import islice

import pytest

from tools.demo_model import facts, topics
from tools.demo_model.grammar import BRIEF, CATEGORIES, dialogues, held_out, is_held_out, statements

SUM = re.compile(r"(\d+) (plus|minus) (\d+) is (\d+)\.")
MEMORY = re.compile(r"(\d+) GiB plus (\d+) GiB is (\d+) GiB\.")


@pytest.fixture(scope="module")
def sample():
    """Twenty thousand training dialogues."""
    return list(islice(dialogues(random.Random(1)), 20000))


def test_the_same_seed_gives_the_same_dialogues_and_questions():
    assert list(islice(dialogues(random.Random(3)), 50)) == list(islice(dialogues(random.Random(3)), 50))
    assert held_out(70, 3) == held_out(70, 3)
    assert held_out(70, 3) != held_out(70, 4)


def test_dialogues_alternate_and_may_begin_with_a_system_prompt(sample):
    for messages in sample[:2000]:
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in messages)
    assert 0.1 < sum(m[0]["content"] == BRIEF for m in sample) / len(sample) < 0.2


def test_most_dialogues_are_short_and_some_are_long(sample):
    turns = sorted(sum(message["role"] == "user" for message in messages) for messages in sample)
    assert 2 <= turns[len(turns) // 2] <= 5
    assert turns[-1] > 12


def test_sums_are_right_and_held_out_pairs_never_occur(sample):
    seen = 0
    for messages in sample:
        for message in messages:
            for a, sign, b, result in SUM.findall(message["content"]) if message["role"] == "assistant" else ():
                assert int(result) == (int(a) + int(b) if sign == "plus" else int(a) - int(b)) >= 0
                assert not is_held_out(topics.sum_key(int(a), int(b)))
                seen += 1
            for a, b, result in MEMORY.findall(message["content"]):
                assert int(a) + int(b) == int(result)
                assert not is_held_out(topics.sum_key(int(a), int(b)))
    assert seen > 15000


def test_statements_are_right_and_hold_nothing_that_is_held_out():
    text = " ".join(islice(statements(random.Random(1)), 5000))
    for a, sign, b, result in SUM.findall(text):
        assert int(result) == (int(a) + int(b) if sign == "plus" else int(a) - int(b)) >= 0
    for a, b, *_ in [(a, b) for a, _, b, _ in SUM.findall(text)] + MEMORY.findall(text):
        assert not is_held_out(topics.sum_key(int(a), int(b)))
    compared = {answer for _, answer in held_out(300, 4, "comparisons") if answer.startswith("The ")}
    assert not [answer for answer in compared if answer in text]


def test_held_out_sums_are_right():
    for messages, answer in held_out(300, 5, "sums"):
        if messages[0]["content"] != BRIEF:
            a, sign, b, result = SUM.fullmatch(answer).groups()
            assert int(result) == (int(a) + int(b) if sign == "plus" else int(a) - int(b))
            assert is_held_out(topics.sum_key(int(a), int(b)))


@pytest.mark.parametrize("category", [name for name in CATEGORIES if name != "recall"])
def test_held_out_questions_never_occur_in_training(sample, category):
    trained = {message["content"].lower() for messages in sample for message in messages if message["role"] == "user"}
    assert not [q for messages, _ in held_out(400, 2, category) if (q := messages[-1]["content"].lower()) in trained]


def test_held_out_recall_is_of_something_told_before():
    for messages, answer in held_out(200, 2, "recall"):
        said = " ".join(message["content"] for message in messages if message["role"] == "user").lower()
        if messages[0]["content"] == BRIEF and "GiB" not in answer and answer != "Neither":
            assert answer.lower().removeprefix("the ") in said
        assert len(messages) >= 3


def test_about_a_tenth_is_held_out():
    pairs = [topics.sum_key(a, b) for a in range(100) for b in range(a, 100)]
    assert 0.08 < sum(map(is_held_out, pairs)) / len(pairs) < 0.12
    assert not is_held_out("")


def test_categories_take_turns_and_can_be_named():
    assert len(held_out(15, 1)) == 15
    assert all("GiB" in a or "core" in a or a for _, a in held_out(20, 1, "devices"))
    units = [f"{n * factor}" for *_, factor, limit in facts.UNITS for n in range(1, limit + 1)]
    assert all(any(value in answer for value in units) for _, answer in held_out(50, 1, "units"))


def test_comparisons_agree_with_the_table():
    by_name = {device.name: device for device in facts.DEVICES}
    pattern = re.compile(r"The (.+) has (\d+) and the (.+) has (\d+), so (?:the )?(.+) has more\.")
    for _, answer in held_out(300, 4, "comparisons"):
        if result := pattern.fullmatch(answer):
            a, m, b, n, best = result.groups()
            assert (by_name[a].cores, by_name[b].cores) == (int(m), int(n))
            assert best == ("neither" if m == n else a if int(m) > int(n) else b)
