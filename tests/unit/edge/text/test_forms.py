"""Test that every part of a conversation reaches the prompt, whatever form a template expects."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import TemplateError
from edge.text.templates.formats import FORMATS
from edge.text.templates.forms import MessageForm, formed
from edge.text.templates.process import TemplateProcess
from edge.text.templates.template import CHATML, ChatTemplate
from tests.support import templates
from tests.support.templates import (
    ALL,
    CALLS,
    EACH,
    FIRST_SYSTEM,
    GEMMA_2,
    GEMMA_3,
    LAST_SYSTEM,
    LLAMA_3,
    MISTRAL,
    NEEDS_TOOLS,
    PARTS,
    PHI_3,
    QWEN_3_5,
    TOOLS,
    USER_LAST,
    USER_PARTS,
)
from tests.support.thorough import some

TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("thoughts", [(None, None), ("T0", None), (None, "T1"), ("T0", "T1"), ("T0", None, "T2")])
def test_turns_that_are_joined_keep_the_thoughts_of_each(thoughts: tuple[str | None, ...]) -> None:
    answers = [
        {"role": "assistant", "content": f"A{number}", **({"reasoning_content": own} if own else {})}
        for number, own in enumerate(thoughts)
    ]
    form = MessageForm(joined=frozenset({"assistant"}))
    [_, joined], _ = formed([{"role": "user", "content": "U"}, *answers], (), form, FORMATS[0])
    assert joined["content"] == "\n\n".join(answer["content"] for answer in answers)
    said = [own for own in thoughts if own]
    assert joined.get("reasoning_content") == ("\n\n".join(said) if said else None)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def turns(roles: str) -> list[dict[str, Any]]:
    """Return a message for each letter: s, u, a; d: of a developer; c: a call, C: with text, too; r: its result."""
    names = {
        "s": "system",
        "u": "user",
        "a": "assistant",
        "d": "developer",
        "c": "assistant",
        "C": "assistant",
        "r": "tool",
    }
    messages: list[dict[str, Any]] = []
    for number, letter in enumerate(roles):
        message: dict[str, Any] = {
            "role": names[letter],
            "content": "" if letter == "c" else f"{letter.upper()}{number}",
        }
        if letter in "cC":
            function = {"name": "weather", "arguments": {"city": f"CITY{number}"}}
            message["tool_calls"] = [{"id": f"call-{number}", "type": "function", "function": function}]
        if letter == "r":
            message["tool_call_id"] = f"call-{number - 1}"
        messages.append(message)
    return messages


CALL = '{"name": "weather", "arguments": {"city": "CITY1"}}'
CALL_TEXT = f"<tool_call>\n{CALL}\n</tool_call>"
RESULT_TEXT = "<tool_response>\nR2\n</tool_response>"


@pytest.mark.parametrize(
    ("source", "roles", "prompt"),
    [
        # Content as parts.
        (PARTS, "suau", "<system>S0\n<user>U1\n<assistant>A2\n<user>U3\n"),
        (USER_PARTS, "suau", "<system>S0\n<user>U1\n<assistant>A2\n<user>U3\n"),
        # System messages.
        (PHI_3, "suau", "<user>S0\n\nU1\n<assistant>A2\n<user>U3\n"),
        (PHI_3, "ssusas", "<user>S0\n\nS1\n\nU2\n<user>S3\n<assistant>A4\n<user>S5\n"),
        (GEMMA_2, "su", "<user>S0\n\nU1\n<model>"),
        (GEMMA_2, "du", "<user>D0\n\nU1\n<model>"),
        (GEMMA_2, "suasu", "<user>S0\n\nU1\n<assistant>A2\n<user>S3\n\nU4\n<model>"),
        (GEMMA_2, "s", "<user>S0\n<model>"),
        (GEMMA_3, "ssu", "<user>S0\n\nS1\n\nU2\n<model>"),
        (GEMMA_3, "uasu", "<user>U0\n<assistant>A1\n<user>S2\n\nU3\n<model>"),
        (GEMMA_3, "s", "<user>S0\n<model>"),
        (FIRST_SYSTEM, "ssusu", "<system>S0\n\nS1\n<user>U2\n<user>S3\n\nU4\n"),
        (LAST_SYSTEM, "suasu", "S0<user>U1\n<assistant>A2\n<user>S3\n\nU4\n"),
        (LAST_SYSTEM, "uasu", "S2<user>U0\n<assistant>A1\n<user>U3\n"),  # the template moves it itself
        (QWEN_3_5, "s", "<user>S0\n"),
        (QWEN_3_5, "suasu", "<system>S0\n<user>U1\n<assistant>A2\n<user>S3\n\nU4\n"),
        (QWEN_3_5, "a", "<user>Begin.\n<assistant>A0\n"),
        # Turns.
        (GEMMA_2, "uu", "<user>U0\n\nU1\n<model>"),
        (GEMMA_2, "uaau", "<user>U0\n<assistant>A1\n\nA2\n<user>U3\n<model>"),
        (GEMMA_2, "au", "<user>Begin.\n<assistant>A0\n<user>U1\n<model>"),
        (GEMMA_2, "sau", "<user>S0\n<assistant>A1\n<user>U2\n<model>"),
        (MISTRAL, "uuaau", "[INST]U0\n\nU1[/INST]A2\n\nA3</s>[INST]U4[/INST]"),
        (USER_LAST, "ua", "<user>U0\n<assistant>A1\n<user>Continue.\n"),
        # Calls and results.
        (PHI_3, "ucr", f"<user>U0\n<assistant>{CALL_TEXT}\n<user>{RESULT_TEXT}\n"),
        (GEMMA_2, "ucru", f"<user>U0\n<assistant>{CALL_TEXT}\n<user>{RESULT_TEXT}\n\nU3\n<model>"),
        (TOOLS, "uCr", f"<user>U0\n<assistant>C1<call>{CALL}\n<tool>R2\n"),
        (CALLS, "uCr", f"<user>U0\n<assistant>C1<call>{CALL}\n<tool>R2\n"),
        (templates.SEES_CALLS_ONLY, "ucr", f"<user>U0\n<assistant><call>{CALL}\n<user>{RESULT_TEXT}\n"),
        (LLAMA_3, "uCr", f"<user>U0\n<assistant>C1\n<call>{CALL}\n<tool>R2\n"),
        (MISTRAL, "ucr", f"[INST]U0[/INST][TOOL_CALLS][{CALL}]</s>[RESULT]R2[/RESULT]"),
        (MISTRAL, "ucrau", f"[INST]U0[/INST][TOOL_CALLS][{CALL}]</s>[RESULT]R2[/RESULT]A3</s>[INST]U4[/INST]"),
        (MISTRAL, "uCra", f"[INST]U0[/INST]C1\n[TOOL_CALLS][{CALL}]</s>[INST]{RESULT_TEXT}[/INST]A3</s>"),
        (MISTRAL, "ucru", f"[INST]U0[/INST][TOOL_CALLS][{CALL}]</s>[INST]{RESULT_TEXT}\n\nU3[/INST]"),
        (MISTRAL, "ucu", f"[INST]U0[/INST][TOOL_CALLS][{CALL}]</s>[INST]U2[/INST]"),
        (templates.KNOWN_RESULTS, "uaru", f"<user>U0\n<assistant>A1\n<user>{RESULT_TEXT}\n<user>U3\n"),
        # A system text that is written only beside the user's last turn.
        (MISTRAL, "su", "[INST]S0\n\nU1[/INST]"),
        (MISTRAL, "sua", "[INST]S0\n\nU1[/INST]A2</s>"),
        (MISTRAL, "sa", "[INST]S0\n\nBegin.[/INST]A1</s>"),
        # Templates that need a list of tools.
        (NEEDS_TOOLS, "su", "<system>S0\n<user>U1\n"),
    ],
)  # fmt: skip
def test_a_conversation_reaches_the_prompt(process: TemplateProcess, source: str, roles: str, prompt: str) -> None:
    assert ChatTemplate(source, process=process).render(turns(roles)) == prompt


@pytest.mark.parametrize("source", [EACH, CHATML, templates.CALLS, TOOLS])
def test_a_template_that_takes_messages_as_they_are_gets_them_unchanged(process: TemplateProcess, source: str) -> None:
    template = ChatTemplate(source, process=process)
    for roles in ("u", "s", "a", "ssuuaasau", "au", "usu", "sas"):
        messages = turns(roles)
        request = {"source": source, "special": {}, "variables": {}, "tools": None, "add_generation_prompt": True}
        assert template.render(messages) == process.ask({**request, "messages": messages})


@pytest.mark.parametrize("source", [EACH, PHI_3, GEMMA_2, GEMMA_3, PARTS, LAST_SYSTEM, templates.CALLS])
def test_tools_that_a_template_does_not_write_are_introduced_in_its_system_text(
    process: TemplateProcess, source: str
) -> None:
    template = ChatTemplate(source, process=process)
    for roles in ("u", "su", "ssuasu"):
        prompt = template.render(turns(roles), tools=[TOOL])
        assert prompt.count('{"type": "function", "function": {"name": "weather"') == 1
        assert prompt.index("weather") < prompt.index("U")
        assert all(message["content"] in prompt for message in turns(roles))
    assert template.render(turns("su")).count("# Tools") == 0


PRINTED_TOOLS = TOOLS.replace("tools | tojson", "tools")  # as Python prints them, as in templates of Apriel


@pytest.mark.parametrize("source", [TOOLS, LLAMA_3, MISTRAL, NEEDS_TOOLS, PRINTED_TOOLS])
def test_tools_that_a_template_writes_are_left_to_it(process: TemplateProcess, source: str) -> None:
    template = ChatTemplate(source, process=process)
    for roles in ("u", "su", "s", "suau"):
        prompt = template.render(turns(roles), tools=[TOOL])
        assert "# Tools" not in prompt
        assert "Tells." in prompt
        assert all(message["content"] in prompt for message in turns(roles))


def test_a_mention_of_tools_is_not_writing_them(process: TemplateProcess) -> None:
    for mention in ("{# tools, tool_calls #}", "{% set n = tools | length if tools else 0 %}"):
        assert "# Tools" in ChatTemplate(mention + EACH, process=process).render(turns("u"), tools=[TOOL])


def test_a_template_is_told_how_to_call_in_its_own_format(process: TemplateProcess) -> None:
    template = ChatTemplate(f"{CALLS}{{# <｜tool▁sep｜> #}}", process=process)
    example = '<｜tool▁call▁begin｜><function-name><｜tool▁sep｜>{"<argument>": "<value>"}<｜tool▁call▁end｜>'
    assert example in template.render(turns("ucr"), tools=[TOOL])
    template = ChatTemplate(f"{EACH}{{# <|tool_call|> #}}", process=process)
    assert '<assistant><|tool_call|>[{"name": "weather", "arguments": {"city": "CITY1"}}]\n' in template.render(
        turns("ucr")
    )


def test_results_have_the_names_of_their_functions_also_where_an_identifier_comes_again(
    process: TemplateProcess,
) -> None:
    source = f"{{% for m in messages if m.role == 'tool' %}}{{{{ m.name }}}}:{{{{ m.content }}}} {{% endfor %}}{TOOLS}"
    first, again = turns("ucr"), turns("ucr")
    again[1]["tool_calls"][0]["function"]["name"] = "time"
    assert ChatTemplate(source, process=process).render([*first, *again]).startswith("weather:R2 time:R2 ")


def test_a_template_that_refuses_everything_says_its_own_reason(process: TemplateProcess) -> None:
    template = ChatTemplate("{{ raise_exception('only in ' ~ language) }}", process=process)
    with pytest.raises(TemplateError, match="refuses these messages: only in Latin"):
        template.render(turns("suasu"), tools=[TOOL], variables={"language": "Latin"})


def test_a_template_is_probed_once(process: TemplateProcess) -> None:
    requests: list[Any] = []

    class Counting(TemplateProcess):
        def ask(self, request: dict[str, Any], wait_s: float = 20.0) -> str:
            requests.append(request["messages"])
            return process.ask(request, wait_s)

    counting = Counting()
    source = f"{EACH}{{# probed once #}}"
    ChatTemplate(source, process=counting).render(turns("u"))
    n_probes = len(requests) - 2  # the check of the source, and the prompt
    assert 0 < n_probes < 10
    ChatTemplate(source, process=counting).render(turns("su"))
    assert len(requests) == n_probes + 4
    counting.close()


conversations = st.lists(
    st.sampled_from(["s", "u", "u", "a", "a", "d", "cr", "Cr", "c", "C", "r"]), min_size=1, max_size=6
).map("".join)


@pytest.mark.parametrize("name", [name for name in ALL if name != "ALL"])
@settings(max_examples=some(8, 100), deadline=None)
@given(roles=conversations, has_tools=st.booleans())
def test_nothing_of_any_conversation_is_lost(process: TemplateProcess, name: str, roles: str, has_tools: bool) -> None:
    messages = turns(roles)
    prompt = ChatTemplate(ALL[name], process=process).render(messages, tools=[TOOL] if has_tools else [])
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    marks = [call["function"]["arguments"]["city"] for call in calls]
    marks += [message["content"] for message in messages]
    assert [mark for mark in marks if mark not in prompt] == []
    assert not has_tools or "Tells." in prompt
