"""Test the detection of reasoning formats in published templates, and the splitter that separates reasoning from
answers.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.text.templates.template import ChatTemplate
from edge.text.thinking_format import _MARKED, AUTO, State, ThinkingFormat, switches, thinking_format, with_thoughts
from edge.text.thinking_splitter import Split, ThoughtSplitter
from tests.support.thinking import NAMES_TOOLS, TEMPLATE, UNOPENED


def form_of(template: str) -> ThinkingFormat:
    form = thinking_format(template)
    assert form is not None
    return form


QWEN = form_of(TEMPLATE)
MISTRAL, GEMMA, HARMONY, COHERE, KIMI = _MARKED[:5]
FORMS = [*_MARKED, QWEN, form_of("{{ '</answer>' }}{{ '<think>' }}{{ '</think>' }}")]


def split(form: ThinkingFormat, state: State, parts: list[str]) -> tuple[str, str]:
    """The thought and the text of an answer that comes in these parts."""
    splitter = ThoughtSplitter(form, state)
    pairs = [*map(splitter.add, parts), splitter.end()]
    return "".join(pair.thought for pair in pairs), "".join(pair.text for pair in pairs)


@given(st.sampled_from(FORMS), st.sampled_from(["start", "thought", "answer"]), st.data())
def test_how_an_answer_is_split_changes_nothing(form: ThinkingFormat, state: State, data: st.DataObject) -> None:
    some = [*form.marks, " ", "\n", "a", "b c", form.opens[:3], form.closes[:4], "<"]
    answer = "".join(data.draw(st.lists(st.sampled_from(some), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    parts = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert split(form, state, parts) == split(form, state, [answer]) == split(form, state, list(answer))


@pytest.mark.parametrize(
    ("form", "state", "answer", "thought", "text"),
    [
        (QWEN, "start", "<think>\nSo.\n\nTwo.\n</think>\n\nHi <think>.", "So.\n\nTwo.", "Hi <think>."),
        (QWEN, "start", "\n<think></think>\nHi", "", "Hi"),
        (QWEN, "thought", "So.\n</think>\n\nHi", "So.", "Hi"),
        (QWEN, "thought", "So. </thin", "So. </thin", ""),
        (QWEN, "start", "  Hi", "", "  Hi"),
        (QWEN, "start", "<thi", "", "<thi"),
        (QWEN, "answer", "<think>a</think>b", "", "<think>a</think>b"),
        (MISTRAL, "start", "[THINK]So.[/THINK]Hi", "So.", "Hi"),
        (GEMMA, "start", "<|channel>thought\nSo.\n<channel|>Hi<|channel>thought\nAh.<channel|>.", "So.\n\nAh.", "Hi."),
        (HARMONY, "start", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
         "So.", "Hi"),
        (HARMONY, "start", "<|channel|>final<|message|>Hi", "", "Hi"),
        (HARMONY, "start", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=f"
         "<|message|>{}", "So.", "<|channel|>commentary to=f<|message|>{}"),
        (COHERE, "start", "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", "So.", "Hi"),
        (KIMI, "thought", "So.<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>", "So.", "Hi"),
    ],
)  # fmt: skip
def test_what_is_thought_and_what_is_said(
    form: ThinkingFormat, state: State, answer: str, thought: str, text: str
) -> None:
    assert split(form, state, list(answer)) == (thought, text)


def test_the_end_of_a_thought_that_a_call_ended_is_no_part_of_the_answer() -> None:
    form = replace(QWEN, calls=("<call>",))
    answer = "So <call> is one.\n</think>\n\nHi </think>"
    assert split(form, "thought", list(answer)) == ("So", "<call> is one.\n\n\nHi </think>")


def test_text_that_cannot_begin_a_mark_does_not_wait() -> None:
    splitter = ThoughtSplitter(QWEN, "thought")
    assert splitter.add("a < b </th") == Split("a < b", "")
    assert splitter.add("e") == Split(" </the", "")
    assert splitter.add("\n</think>\n") == Split("", "")
    assert (splitter.state, splitter.add("So")) == ("answer", Split("", "So"))


@pytest.mark.parametrize(
    ("template", "opens", "closing"),
    [
        (TEMPLATE, "<think>", "\n</think>\n\n"),
        ("{{ '<think>' + c.split('</think>')[0] + '</think>' }}", "<think>", "</think>"),
        ("{% set end = '</seed:think>' %}", "<seed:think>", "</seed:think>"),
        ("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", "[THINK]", "[/THINK]"),
        ("{{ '<|channel>thought\\n<channel|>' }}", "<|channel>thought", "<channel|>"),
        ("{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}", "<|channel|>analysis<|message|>",
         "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("{{ '<|START_THINKING|><|END_THINKING|>' }}", "<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
        ("{{ '<|open|>' + tag + '<|sep|>' }}{{ open_tag('think') }}", "<|open|>think<|sep|>",
         "<|close|>think<|sep|><|open|>response<|sep|>"),
    ],
)  # fmt: skip
def test_the_format_is_the_one_that_the_template_writes(template: str, opens: str, closing: str) -> None:
    form = form_of(template)
    assert (form.opens, form.closing()) == (opens, closing)


def test_a_template_without_marks_does_not_think() -> None:
    assert thinking_format("{% for m in messages %}{{ m.content }} I think so{% endfor %}") is None


@pytest.mark.parametrize(
    ("form", "prompt", "state"),
    [
        (QWEN, "Hi<|assistant|>", "start"),
        (QWEN, "Hi<|assistant|><think>\n", "thought"),
        (QWEN, "Hi<|assistant|><think>", "thought"),
        (QWEN, "Hi<|assistant|><think>\n\n</think>\n\n", "answer"),
        (QWEN, "Hi<|assistant|></think>", "answer"),
        (QWEN, "<think>a</think>Ah<|end|><|assistant|>", "start"),
        (QWEN, "Say <think><|end|>\n<|assistant|>", "start"),
        (form_of("</seed:think>"), "Hi<seed:think><seed:cot_budget_reflect>", "thought"),
        (HARMONY, "Hi<|end|><|start|>assistant", "start"),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>", "answer"),
    ],
)
def test_where_an_answer_is_behind_its_prompt(form: ThinkingFormat, prompt: str, state: State) -> None:
    assert form.begins(prompt) == state


def test_switches_have_the_names_of_templates() -> None:
    assert switches(AUTO) == {}
    assert switches(0) == {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
    assert switches(9) == {"enable_thinking": True, "thinking": True, "thinking_budget": 9}
    hi = [{"role": "user", "content": "Hi"}]
    template = ChatTemplate(TEMPLATE)
    assert template.render(hi).endswith("<|assistant|><think>\n")
    assert template.render(hi, think=0).endswith("<think>\n\n</think>\n\n")
    assert template.render(hi, think=0, variables={"enable_thinking": True}).endswith("<|assistant|><think>\n")


def test_thoughts_come_to_the_template_under_its_names() -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "Hi", "reasoning_content": "So."}

    def given_to(template: str, **more: Any) -> dict[str, Any]:
        [values] = with_thoughts([{**answer, **more}], template)
        return {key: values[key] for key in values.keys() - {"role", "tool_calls"}}

    assert given_to("{{ m.reasoning_content }}") == {"content": "Hi", "reasoning_content": "So."}
    assert given_to("{{ m.get('reasoning') }}") == {"content": "Hi", "reasoning": "So."}
    assert given_to("{{ m.content }} enable_thinking") == {"content": "Hi"}
    assert given_to("{{ m.thinking }}") == {"content": "Hi", "thinking": "So."}
    assert given_to("{{ m.thinking }}", tool_calls=[{}]) == {"content": "Hi"}
    parts = given_to("[THINK] {{ block['type'] == 'thinking' }}")["content"]
    assert parts == [{"type": "thinking", "thinking": "So."}, {"type": "text", "text": "Hi"}]


def test_a_thought_stays_in_a_loop_of_tools_and_leaves_with_the_next_question() -> None:
    template = ChatTemplate(NAMES_TOOLS + UNOPENED)
    loop: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": []},
        {"role": "tool", "content": "7"},
    ]
    assert "<think>\nSo.\n</think>" in template.render(loop)
    assert "So." not in template.render([*loop, {"role": "user", "content": "And?"}])
