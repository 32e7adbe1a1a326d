"""Test that earlier tool calls reach a template in the form that it expects."""

from collections.abc import Iterator
from typing import Any

import pytest

from edge.text.templates.calls import CallForm, in_form
from edge.text.templates.process import TemplateProcess
from edge.text.templates.template import ChatTemplate

NAME, ARGUMENTS = "c['function']['name']", "c['function']['arguments']"
OBJECT = f"{{{{ '<' + {NAME} + ' ' + ({ARGUMENTS} | tojson) + '>' }}}}"
TEXT = f"{{{{ '<' + {NAME} + ' ' + {ARGUMENTS} + '>' }}}}"
PRINTS = f"{{{{ '<' + {NAME} }}}} {{{{ {ARGUMENTS} }}}}>"


def template_of(calls: str) -> str:
    """Return a template with this for the calls of a message."""
    other = "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    return f"{{% for m in messages %}}{{% if m.tool_calls %}}{calls}{other}"


def every(call: str) -> str:
    return template_of(f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}")


def first(call: str) -> str:
    return template_of(f"{{% set c = m.tool_calls[0] %}}{call}")


def call(name: str, value: str) -> dict[str, Any]:
    return {"id": f"id-{value}", "type": "function", "function": {"name": name, "arguments": {"k": value}}}


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [call("f", "a"), call("g", "b")]},
    {"role": "tool", "content": "B", "tool_call_id": "id-b"},
    {"role": "tool", "content": "A", "tool_call_id": "id-a"},
    {"role": "tool", "content": "C", "tool_call_id": "id-c"},
]
TOGETHER = '[hi]<f {"k": "a"}><g {"k": "b"}>[B][A][C]'
APART = '[hi]<f {"k": "a"}>[A]<g {"k": "b"}>[B][C]'


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (every(OBJECT), TOGETHER),
        (every(TEXT), TOGETHER),
        (every(PRINTS), TOGETHER),
        (first(OBJECT), APART),
        (first(TEXT), APART),
        (every(OBJECT).replace("{% if m.tool_calls %}", "{% if m.content is none %}"), TOGETHER),
        (
            "{% if messages[1] is defined and messages[1].tool_calls | length > 1 %}"
            "{{ raise_exception('one') }}{% endif %}" + every(TEXT),
            APART,
        ),
        (
            "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls if c.id | length != 9 %}"
            "{{ raise_exception('nine') }}{% endfor %}{% endfor %}" + first(TEXT),
            APART,
        ),
    ],
    ids=["object", "text", "printed", "first", "first text", "no content", "raises", "short ids"],
)
def test_calls_are_written_whatever_form_a_template_takes(process: TemplateProcess, source: str, prompt: str) -> None:
    template = ChatTemplate(source, process=process)
    assert template.render(MESSAGES) == prompt
    assert template.render(MESSAGES[:1]) == "[hi]"


def test_short_identifiers_are_the_same_in_calls_and_results() -> None:
    short = in_form([*MESSAGES, {**MESSAGES[2], "tool_call_id": "abcdef123"}], CallForm(short_ids=True))
    ids = [call["id"] for call in short[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in short[2:4]] == ids[::-1]
    assert all(len(identifier) == 9 and identifier.isalnum() for identifier in ids)
    assert len({*ids, short[4]["tool_call_id"]}) == 3
    assert short[5]["tool_call_id"] == "abcdef123"


def test_a_template_that_writes_no_calls_gets_them_as_text(process: TemplateProcess) -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"k": "{value}"}}}}\n</tool_call>'
        for name, value in ("fa", "gb")
    ]
    results = "".join(f"[<tool_response>\n{value}\n</tool_response>]" for value in "BAC")
    prompt = ChatTemplate(source, process=process).render(MESSAGES)
    assert prompt == f"[hi][{calls[0]}\n{calls[1]}]{results}"
    assert in_form(MESSAGES, CallForm()) == MESSAGES


def test_a_template_may_keep_lists_of_its_own(process: TemplateProcess) -> None:
    source = "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.role) %}{% endfor %}"
    assert ChatTemplate(f"{source}{{{{ ns.ids.pop(0) }}}} {{{{ ns.ids }}}}", process=process).render(MESSAGES[:2]) == (
        "user ['assistant']"
    )
    loop = "{% for m in messages %}{{ m.content.replace('h', 'H') }}{% endfor %}{{ messages | map('upper') | tojson }}"
    assert ChatTemplate(loop, process=process).render([{"role": "user", "content": "hi"}]).startswith("Hi[")
