"""Chat templates: rendered as Hugging Face renders them, in a sandbox that ends."""

import pytest

from edge.errors import TemplateError
from edge.template import CHATML, TRANSCRIPT, ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello <you> & me"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]


def test_chatml() -> None:
    assert ChatTemplate(CHATML).render(MESSAGES) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello <you> & me<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_the_conversation_just_ends() -> None:
    assert ChatTemplate(CHATML).render(MESSAGES[:1], add_generation_prompt=False).endswith("Be kind.<|im_end|>\n")


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
        ("{{ messages[0]['content'] | tojson }}", '"Be kind."'),
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
    ],
)
def test_what_published_templates_use(source: str, expected: str) -> None:
    assert ChatTemplate(source, bos="<s>", eos="</s>").render(MESSAGES) == expected


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
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.x }}",
        "{{ 'abc' + 1 }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 'x'.center(500000000) }}",
        "{{ 'x' | center(500000000) }}",
        "{{ '%500000000d' % 1 }}",
        "{{ '%500000000d' | format(1) }}",
        "{{ '{:>500000000}'.format(1) }}",
        "{{ 'a\nb' | indent(500000000) }}",
        "{{ 'x'.zfill(500000000) }}",
        "{{ ('a' * 60000).replace('a', 'b' * 9000) }}",
        "{{ ('a' * 60000) | replace('a', 'b' * 9000) }}",
        "{{ ('a' * 60000).join(range(9000)) }}",
        "{{ range(9000) | join('a' * 60000) }}",
        "{{ range(9) | slice(30000000) | list }}",
        "{{ lipsum(n=30000) }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ 9 ** 99999999 }}",
        "{{ ['a' * 9999999] * 9999999 }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(MESSAGES)
