"""Test chat templates: they are rendered like by Hugging Face, in a sandbox with limits."""

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.errors import TemplateError
from edge.text.templates.child import ROOM_BYTES
from edge.text.templates.process import CPU_S, TemplateProcess
from edge.text.templates.template import CHATML, CONTINUES, MAX_SOURCE, TRANSCRIPT, ChatTemplate
from tests.support.helpers import stand_still, until
from tests.support.thorough import thorough

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind.", "tool_calls": []},
    {"role": "user", "content": "Hello <you> & me"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module", autouse=True)
def started_as_people_s_are() -> Iterator[None]:
    """Processes whose memory and time are their own, and not shared with one that forks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.text.templates.process.subprocess", subprocess)
        yield


@pytest.fixture(scope="module")
def shared(started_as_people_s_are: None) -> Iterator[TemplateProcess]:
    """A process for tests that leave it alive."""
    process = TemplateProcess()
    yield process
    process.close()


def test_chatml() -> None:
    assert ChatTemplate(CHATML).render(MESSAGES) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello <you> & me<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_the_conversation_just_ends() -> None:
    assert ChatTemplate(CHATML).render(MESSAGES[:1], add_generation_prompt=False).endswith("Be kind.<|im_end|>\n")


REFUSES = "{% if messages[-1].role != 'user' %}{{ raise_exception('Ask first.') }}{% endif %}"
EACH = "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}\n{% endfor %}"
OPENS = "{% if add_generation_prompt %}<assistant><think>{% endif %}"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (CHATML, "<|im_start|>user\n2 plus <|im_end|>\n<|im_start|>assistant\n2 plus "),
        (TRANSCRIPT, "User: 2 plus\nAssistant: 2 plus "),
        (EACH, "<user> 2 plus\n<assistant> 2 plus "),  # with its own white space
        (f"{EACH}{OPENS}{{# </think> #}}", "<user> 2 plus\n<assistant> 2 plus "),
        (f"{EACH}(2 plus )", "<user> 2 plus\n<assistant> 2 plus "),
        (EACH.replace("trim", "upper"), "<user> 2 PLUS \n<assistant> 2 PLUS "),
        # The text is written otherwise, twice or not at all: it follows the prompt of an answer without a thought.
        (EACH.replace(" | trim", "[:6]") + OPENS, "<user> 2 plus\n<assistant><think>2 plus "),
        (EACH.replace(" | trim", "[2:]") + OPENS, "<user> plus \n<assistant><think>2 plus "),
        (REFUSES + EACH + OPENS, "<user> 2 plus\n<assistant><think>2 plus "),
        (EACH * 2, f"{'<user> 2 plus' + chr(10)}" * 2 + "2 plus "),
        ("{{ messages[0].content }}" + OPENS + "{# </think> #}", "2 plus <assistant><think></think>2 plus "),
        ("{{ messages[0].content }}{# <|channel|>analysis #}", "2 plus <|channel|>final<|message|>2 plus "),
    ],
    ids=range(12),
)
def test_an_answer_goes_on_behind_what_a_template_writes_of_its_beginning(
    shared: TemplateProcess, source: str, prompt: str
) -> None:
    """Though the same text comes before and after it."""
    messages = [{"role": "user", "content": "2 plus "}, {"role": "assistant", "content": "2 plus ", CONTINUES: True}]
    assert ChatTemplate(source, process=shared).render(messages) == prompt


@pytest.mark.parametrize("said", ["An icon: \ue000", "\ue000", "Because"])
def test_a_text_for_private_use_begins_an_answer_too(shared: TemplateProcess, said: str) -> None:
    for question in ("What?", "What is \ue000?", "Because \ue000?"):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": said, CONTINUES: True}]
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{said}"
        assert ChatTemplate(CHATML, process=shared).render(messages) == prompt


def test_a_model_without_a_template_gets_one_its_vocabulary_knows() -> None:
    chatml = ChatTemplate.for_model({"tokenizer.ggml.tokens": ["a", "<|im_start|>", "<|im_end|>"]}, "", "")
    assert chatml.source == CHATML
    plain = ChatTemplate.for_model({"tokenizer.ggml.tokens": ["a"]}, "", "")
    assert plain.source == TRANSCRIPT
    assert plain.render(MESSAGES).endswith("User: Bye\nAssistant:")
    assert "\nUser:" in plain.stops
    own = ChatTemplate.for_model({"tokenizer.chat_template": "{{ bos_token }}x"}, "<s>", "</s>")
    assert own.render(MESSAGES) == "<s>x"


@pytest.mark.parametrize("source", [CHATML, TRANSCRIPT])
def test_a_turn_only_adds_to_the_one_before(source: str) -> None:
    """So that what was computed for it can be kept."""
    template = ChatTemplate(source)
    generated = " word" if source == TRANSCRIPT else "word"
    before = template.render(MESSAGES[:2]) + generated
    after = [*MESSAGES[:2], {"role": "assistant", "content": generated}, MESSAGES[3]]
    assert template.render(after).startswith(before)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | map(attribute='content') | list | tojson }}", '["Be kind.", "Hello <you> & me", "Hi.", "Bye"]'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% for m in messages %}{% if loop.last %}{{ m.role }}{% endif %}{% endfor %}", "user"),
        ("{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ loop.length }}{% endfor %}", "44"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
        ("  {%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
        ("{% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{{ eos_token }}{{ strftime_now('%%') }}", "</s>%"),
        ("{{ 'a-b'.replace('-', '+') }}{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['a']) }}", "a+ba, ba"),
        ("{{ 'a\nb' | indent(2) }}{{ 7 % 4 }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[1] }}", "a\n  b3xb"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}", "2"),
        ("{{ 'a' ~ 1 ~ none }}{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 'a' + 'b' }}", "a1None6ababab"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') }}", "[a]"),
        # Filters, tests and methods that templates may use because transformers has them.
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True) }}", r'{"a": "\u00e9", "b": 1}'),
        ("{{ {'b': [1, 2], 'a': '<&>'} | tojson(separators=(',', ':')) }}", '{"b":[1,2],"a":"<&>"}'),
        ("{{ messages | join(', ', attribute='role') }}", "system, user, assistant, user"),
        (
            "{% for pair in messages | map(attribute='role') | batch(2) %}{{ pair | join('+') }};{% endfor %}",
            "system+user;assistant+user;",
        ),
        ("{{ '%s-%02d' | format('a', 7) }}{{ ' %s=%d' % ('b', 8) }}{{ ' {} {:>3}'.format('c', 9) }}", "a-07 b=8 c   9"),
        ("{{ messages[1].content | wordcount }}{{ 'a\nb' | indent(4, true) }}", "3    a\n    b"),
        ("{{ 'ab' | center(6) }}{{ '7'.zfill(3) }}{{ 'a b'.title() }}{{ 'x' | upper | lower }}", "  ab  007A Bx"),
        (
            "{{ 'a long text' | truncate(6, true, '...', 0) }}{{ [3, 1] | sort | join }}{{ {'k': 1} | items | list }}",
            "a l...13[('k', 1)]",
        ),
        ("{% for role, ms in messages | groupby('role') %}{{ role[0] }}{{ ms | length }}{% endfor %}", "a1s1u2"),
        ("{{ 7 is odd }}{{ 'a' is string }}{{ [1] is sequence }}{{ 2 in [1, 2] }}{{ 2 ** 8 }}", "TrueTrueTrueTrue256"),
        (
            "{{ messages | map(attribute='role') | map('upper') | unique | list | tojson }}",
            '["SYSTEM", "USER", "ASSISTANT"]',
        ),
        ("{% for a in [['x', ['y']]] recursive %}{{ a if a is string else loop(a) }}{% endfor %}", "xy"),
        ("{% set j = joiner('|') %}{% for m in messages %}{{ j() }}{{ m.role[0] }}{% endfor %}", "s|u|a|u"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "aba"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role[0] }}{% endfor %}", "sa"),
        ("{{ 'a<b>' | escape }}{{ 'x' | default('y') }}{{ none | default('z', true) }}", "a&lt;b&gt;xz"),
    ],
)
def test_what_published_templates_use(source: str, expected: str, shared: TemplateProcess) -> None:
    assert ChatTemplate(source, bos="<s>", eos="</s>", process=shared).render(MESSAGES) == expected


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(TemplateError, match="refuses these messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.clear() }}",
        "{{ messages.extend([1]) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.x }}",
        "{{ 'abc' + 1 }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error(source: str, shared: TemplateProcess) -> None:
    refused(source, shared)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for m in messages %}x{% set _ = messages.append(m) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ range(10**9) | list }}",
        "{{ messages[0].content * 10**9 }}",
        "{{ messages[0].content.center(10**9) }}",
        "{{ messages[0].content | center(10**9) }}",
        "{{ messages[0].content.zfill(10**9) }}",
        "{{ '%1000000000d' % messages | length }}",
        "{{ '%*d' % (10**9, messages | length) }}",
        "{{ '%1000000000d' | format(messages | length) }}",
        "{{ '{:>1000000000}'.format(messages | length) }}",
        "{{ 'a\nb' | indent(500000000) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ ('a' * 60000).replace('a', 'b' * 9000) }}",
        "{{ ('a' * 60000).join(range(9000)) }}",
        "{{ range(9) | slice(30000000) | list }}",
        "{{ range(9) | batch(10**9, 'x') | list }}",
        "{{ ('a' * 10**6) | wordwrap(1, wrapstring='b' * 10**6) }}",
        "{{ strftime_now('%Y' * 10**7) }}",
        "{{ lipsum(n=30000) }}",
        "{{ 9 ** 999999999 }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ ['a' * 9999999] * 9999999 }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set x = [] %}{% set _ = x.append(x) %}{{ x | tojson }}",
    ],
)
def test_a_template_that_would_not_end_or_takes_too_much_is_stopped(source: str, shared: TemplateProcess) -> None:
    refused(source, shared)
    assert ChatTemplate("{{ messages[0].content }}", process=shared).render(MESSAGES[:1]) == "Be kind."


def test_a_reason_is_short() -> None:
    assert len(refused("{{ raise_exception('no ' * 9999) }}")) <= 500


DOUBLED = "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLED + "{{ n.x | string }}",
        DOUBLED + "{{ n.x ~ '' }}",
        DOUBLED + "{{ raise_exception(n.x) }}",
        *thorough(
            DOUBLED + "{{ n.x | tojson }}",
            DOUBLED + "{{ n.x }}",
            DOUBLED + "{{ n.x | join }}",
            DOUBLED + "{{ [n.x] | map('string') | list }}",
            DOUBLED + "{{ n.x | sum(start=n.x ~ '') }}",
            "{{ 1 }}" * 100_000,
            "{% for i in range(99999) %}{{ (messages * 9000) | sort(attribute='role') | length }}{% endfor %}",
        ),
        DOUBLED.replace("[1]", "{}").replace("[n.x, n.x]", "dict(a=n.x, b=n.x)") + "{{ n.x }}",
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
        "{{ ([[1] * 60000] * 1000) | sum(start=[]) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 90_000 + "]" * 90_000 + " }}",
        "{{ " + "not " * 9000 + "1 }}",
        "{{ " + "1 + " * 90_000 + "1 }}",
        "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
        "{% set x = [1] * 60000 %}{% for i in range(90000) %}{% if x == x | list %}{% endif %}{% endfor %}",
        "{% set x = ['a' * 60000] * 60000 %}{{ x | string }}",
        "{% set x = [[1] * 60000] * 60000 %}{{ x | map('list') | list }}",
        "{{ (['a' * 60000] * 999) | sort | unique | list | tojson(indent=9) | upper | escape | indent(9) }}",
        "{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = n.x * 9 + n.x %}{% endfor %}{{ n.x }}",
        "x" * (MAX_SOURCE + 1),
    ],
)
def test_a_hostile_template_ends_soon_and_stays_small(source: str) -> None:
    """Some templates are stopped only by limits of the process: of memory, and of processor time."""
    before = spent_s()
    process = TemplateProcess()
    assert "\n" not in refused(source, process)
    status = Path(f"/proc/{process._process.pid}/status")
    if status.exists():  # Linux; 0 kB where a new process has not begun
        peak_kib = int(status.read_text().partition("VmHWM:")[2].split()[0])
        assert peak_kib <= 64 << 10
    assert ChatTemplate("{{ messages[0].content }}", process=process).render(MESSAGES[:1]) == "Be kind."
    process.close()
    assert spent_s() - before < 2 * CPU_S + 2  # two for the start of two processes beside a busy neighbour


def refused(source: str, process: TemplateProcess | None = None) -> str:
    """The reason for which a template is."""
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, process=process).render(MESSAGES)
    return str(caught.value)


def spent_s() -> float:
    """Processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_long_conversation_is_no_attack() -> None:
    long = [{"role": "user", "content": "héllo \U0001f600 " * 200_000}, *MESSAGES]
    text = ChatTemplate(CHATML).render(long)
    assert long[0]["content"] in text
    assert text.endswith("assistant\n")


def test_a_long_conversation_may_follow_a_short_one() -> None:
    """The limits of a request end with it: the next one may be larger than they allow."""
    process = TemplateProcess()
    template = ChatTemplate("{{ messages[0].content | length }}", process=process)
    assert template.render(MESSAGES) == "8"
    before = process._process.pid
    longer = 2 * ROOM_BYTES  # characters: its text alone is more than the first request may hold
    assert template.render([{"role": "user", "content": "x" * longer}]) == str(longer)
    assert process._process.pid == before
    process.close()


def test_whatever_happens_to_its_process_the_next_prompt_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess()
    template = ChatTemplate("{{ messages[0].content }}", process=process)
    exchange = process._exchange

    def killed(line: bytes, wait_s: float) -> bytes:
        # Once a request is on its way: before, another process takes its place.
        os.kill(process._process.pid, signal.SIGKILL)
        return exchange(line, wait_s)

    monkeypatch.setattr(process, "_exchange", killed)
    with pytest.raises(TemplateError, match="ended by signal 9"):
        template.render([{"role": "user", "content": "a"}])
    monkeypatch.undo()
    assert template.render([{"role": "user", "content": "b"}]) == "b"

    stand_still(process._process.pid)
    with pytest.raises(TemplateError, match=r"no answer in 0\.1 s"):
        process.ask({"source": "", "messages": None}, wait_s=0.1)
    assert template.render([{"role": "user", "content": "c"}]) == "c"


def test_a_process_that_another_thread_ends_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess()

    def closed(line: bytes, wait_s: float) -> bytes:
        process._end.detach()
        process._socket.close()
        process._process.kill()
        return b""

    monkeypatch.setattr(process, "_exchange", closed)
    assert "ended by signal 9" in refused("x", process)


def test_ctrl_c_ends_a_rendering_and_its_answer_is_nobodys() -> None:
    process = TemplateProcess()
    template = ChatTemplate("{{ messages[0].content }}", process=process)
    stand_still(process._process.pid)
    interrupting = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "a"}])
    interrupting.join()
    assert template.render([{"role": "user", "content": "b"}]) == "b"


def test_the_process_ends_with_its_owner() -> None:
    process = TemplateProcess()
    pid = process._process.pid
    del process
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")
