"""Lines about what happened to a model."""

from hypothesis import given
from hypothesis import strategies as st

from edge.serve.events import Events


@given(st.lists(st.text(max_size=600), max_size=120))
def test_the_latest_lines_are_kept_and_all_are_said(texts: list[str]) -> None:
    said: list[str] = []
    events = Events("demo", said.append, iter(range(1000)).__next__)
    for text in texts:
        events.say(f"demo: {text}")
    assert said == [f"demo: {text}" for text in texts]
    lines = events.to_json()
    assert len(lines) == min(50, len(texts))
    assert [event["time"] for event in lines] == [*range(len(texts))][-50:]
    for event, text in zip(lines, texts[-50:], strict=True):
        assert event["text"].isprintable()
        assert len(event["text"]) <= 500
        if text.isprintable():
            assert event["text"] == text[:500]
