"""Tool call formats: how a model writes calls of functions, detected in the source of its chat template.

A format has marks around calls, and one of four styles for names and arguments:

    json        {"name": "f", "arguments": {...}}, or a list of these
    named       f, a mark, and the arguments as one object
    parameters  f, and each argument between its own tags
    pythonic    [f(a=1), g(b='x')]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Style = Literal["json", "named", "parameters", "pythonic"]
_NAME, _INDEX = r"(?P<name>[\w.-]+?)", r"\d+"


@dataclass(frozen=True)
class Notation:
    """Notation of values."""

    quotes: tuple[str, ...] = ('"',)  # quotes around texts; the first is used for writing
    escapes: Literal["", "json", "python"] = "json"  # escape rules of a backslash in a text; "": none
    bare_keys: bool = False  # keys of objects have no quotes
    true: str = "true"
    false: str = "false"
    null: str = "null"
    item: str = ", "  # separator between items, for writing
    key: str = ": "  # separator between key and value, for writing

    @property
    def words(self) -> dict[str, str]:
        """Map from each word for a value to its JSON. The words of JSON itself are always understood."""
        return {word: word for word in ("true", "false", "null")} | {
            self.true: "true", self.false: "false", self.null: "null"
        }  # fmt: skip


JSON = Notation()
PYTHON = Notation(("'", '"'), "python", true="True", false="False", null="None")
GEMMA = Notation(('<|"|>',), escapes="", bare_keys=True, item=",", key=":")


@dataclass(frozen=True)
class CallFormat:
    """Tool call format: `opens`, then calls, each between `begins` and `ends`, then `closes`.

    White space between these marks is ignored.
    """

    name: str
    style: Style
    opens: tuple[str, ...] = ()  # alternative marks that begin calls; the first is used for writing
    closes: str = ""
    begins: str = ""
    ends: str = ""
    bare: str = ""  # character that may begin calls in an answer without `opens`; empty: none
    skipped: tuple[str, ...] = ()  # other marks that may follow calls
    signs: tuple[str, ...] = ()  # a template that contains all of these has this format
    # Text that begins a call at the start of an answer, if an answer's header could begin in the same way.
    answer: str = ""
    ends_thought: bool = False  # the marks are tokens that thoughts do not use otherwise, so calls end a thought
    is_section: bool = False  # all calls are between a single `opens` and `closes`
    space: str = ""  # white space inside marks, for writing
    between: str = ""  # text between two calls, for writing
    # For style "json":
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    # For style "named":
    header: str = "{name}"  # text before the arguments; {index} is a number
    headers: str = ""  # regular expression of other accepted headers
    before: str = ""  # text between header and arguments
    # For style "parameters":
    name_end: str = ""
    key: str = ""
    key_end: str = ""
    other_key_end: str = ""  # end of a key whose value is JSON instead of text; empty: the schema decides
    value: str = ""  # text between a key and its value
    value_end: str = ""
    padding: str = ""  # white space around values, not part of them
    cdata: bool = False  # a value may be enclosed in <![CDATA[...]]>
    # For all styles:
    notation: Notation = JSON

    @property
    def starts(self) -> tuple[str, ...]:
        """Marks that may begin a call in a text. Models sometimes leave out the outer ones."""
        return (*self.opens, *((self.begins,) if self.begins else ()))

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of this format. Any of their tokens may be control tokens, which have no text by themselves."""
        inner = (self.header, self.before, self.name_end, self.key, self.key_end, self.value, self.value_end)
        texts = (*self.starts, self.closes, self.ends, *self.skipped, *inner, *self.notation.quotes)
        return tuple(dict.fromkeys(text for text in texts if text))

    def name_in(self, header: str) -> str | None:
        """Return the function name in the text between `begins` and `before`, or None if the text is no header."""
        header = header.strip()
        written = re.escape(self.header.strip()).replace(r"\{name\}", _NAME).replace(r"\{index\}", _INDEX)
        match = re.fullmatch(written, header) or (re.fullmatch(self.headers, header) if self.headers else None)
        return match["name"] if match else None


HERMES = CallFormat(
    "hermes", "json", ("<tool_call>",), "</tool_call>", space="\n", between="\n", signs=("<tool_call>",)
)
_MISTRAL_ARGS = CallFormat(
    "mistral-args", "named", ("[TOOL_CALLS]",), begins="[TOOL_CALLS]", before="[ARGS]",
    headers=rf"{_NAME}\[CALL_ID\][^\[\]]*", skipped=("[CALL_ID]",), signs=("[TOOL_CALLS]", "[ARGS]"), ends_thought=True,
)  # fmt: skip
_QWEN_XML = CallFormat(
    "qwen-xml", "parameters", ("<tool_call>",), "</tool_call>", "<function=", "</function>", name_end=">",
    key="<parameter=", key_end=">", value_end="</parameter>", space="\n", padding="\n", between="\n",
    signs=("<tool_call>", "<function=", "<parameter="),
)  # fmt: skip
_GLM = CallFormat(
    "glm", "parameters", ("<tool_call>",), ends="</tool_call>", key="<arg_key>", key_end="</arg_key>",
    value="<arg_value>", value_end="</arg_value>", space="\n", between="\n", signs=("<tool_call>", "<arg_key>"),
)  # fmt: skip
_DEEPSEEK = CallFormat(
    "deepseek", "named", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", is_section=True, before="<｜tool▁sep｜>", signs=("<｜tool▁sep｜>",), ends_thought=True,
)  # fmt: skip
_DSML = CallFormat(
    "deepseek-dsml", "parameters", ("<｜DSML｜function_calls>",), "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="', "</｜DSML｜invoke>", name_end='">', key='<｜DSML｜parameter name="',
    is_section=True, key_end='" string="true">', other_key_end='" string="false">', value_end="</｜DSML｜parameter>",
    space="\n", between="\n", signs=("｜DSML｜", "function_calls"), ends_thought=True,
)  # fmt: skip
_LIST = CallFormat("list", "json", is_list=True, between=", ")
_PYTHONIC = CallFormat(
    "pythonic", "pythonic", ("<|python_start|>",), "<|python_end|>", bare="[", notation=PYTHON, between=", ",
    signs=("tools", "[func_name1("),
)  # fmt: skip
_LFM2 = replace(
    _PYTHONIC, name="lfm2", opens=("<|tool_call_start|>",), closes="<|tool_call_end|>", bare="",
    signs=("<|tool_call_start|>",), ends_thought=True,
)  # fmt: skip
# A template has the first of these formats whose signs it contains.
FORMATS = (
    _MISTRAL_ARGS,
    replace(_LIST, name="mistral", opens=("[TOOL_CALLS]",), signs=("[TOOL_CALLS]",), ends_thought=True),
    replace(
        _QWEN_XML, name="seed", opens=("<seed:tool_call>",), closes="</seed:tool_call>", padding="",
        signs=("<seed:tool_call>",),
    ),
    _QWEN_XML,
    _GLM,
    CallFormat(
        "gemma", "named", ("<|tool_call>",), begins="<|tool_call>", header="call:{name}", ends="<tool_call|>",
        skipped=("<|tool_response>",), notation=GEMMA, signs=("<|tool_call>call:",), ends_thought=True,
    ),
    CallFormat(  # gpt-oss. The mark <|call|> ends the message and the answer
        "harmony", "named", ("<|channel|>", " to=functions."), skipped=("<|call|>",),
        answer="<|channel|>commentary to=functions.",
        header="commentary to=functions.{name} <|constrain|>json", before="<|message|>",
        headers=r"(?:(?:commentary|analysis) to=functions\.)?(?P<name>[\w.-]+)(?:<\|channel\|>(?:commentary|analysis))?"
        r"(?:(?: ?<\|constrain\|>| )json)?",
        signs=("<|channel|>commentary",),
    ),
    replace(
        _DEEPSEEK, name="deepseek-r1", header="function<｜tool▁sep｜>{name}\n", before="```json\n",
        ends="\n```<｜tool▁call▁end｜>", signs=("<｜tool▁sep｜>", "```json"),
    ),
    _DEEPSEEK,
    _DSML,
    replace(
        _DSML, name="deepseek-v4", opens=("<｜DSML｜tool_calls>",), closes="</｜DSML｜tool_calls>", signs=("｜DSML｜",)
    ),
    CallFormat(
        "kimi", "named", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>", is_section=True, header="functions.{name}:{index}",
        headers=r"(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?",
        before="<|tool_call_argument_begin|>", signs=("<|tool_call_begin|>",), ends_thought=True,
    ),
    CallFormat(
        "minimax", "parameters", ("<minimax:tool_call>",), "</minimax:tool_call>", '<invoke name="', "</invoke>",
        is_section=True, name_end='">', key='<parameter name="', key_end='">', value_end="</parameter>",
        space="\n", between="\n", signs=("<minimax:tool_call>",), ends_thought=True,
    ),
    replace(_LIST, name="granite", opens=("<|tool_call|>",), signs=("<|tool_call|>",), ends_thought=True),
    replace(_LIST, name="nemotron", opens=("<TOOLCALL>",), closes="</TOOLCALL>", signs=("<TOOLCALL>",)),
    replace(_LIST, name="apriel", opens=("<tool_calls>",), closes="</tool_calls>", signs=("<tool_calls>[",)),
    replace(
        _LIST, name="cohere", opens=("<|START_ACTION|>",), closes="<|END_ACTION|>", name_key="tool_name",
        arguments_key="parameters", signs=("<|START_ACTION|>",), ends_thought=True,
    ),
    CallFormat(
        "solar", "named", ("<|tool_calls|>",), "<|calls|>", "<|tool_call:begin|>", "<|tool_call:end|>",
        is_section=True, header="{index}<|tool_call:name|>{name}",
        headers=r"[\w-]*<\|tool_call:name\|>(?P<name>[\w.-]+)",
        before="<|tool_call:args|>", signs=("<|tool_call:begin|>",), ends_thought=True,
    ),
    CallFormat(
        "minicpm", "parameters", begins='<function name="', name_end='">', ends="</function>", key='<param name="',
        key_end='">', value_end="</param>", cdata=True, signs=('<function name="', '<param name="'),
    ),
    CallFormat(
        "functionary", "named", begins="<function=", before=">", ends="</function>", signs=("<function=",)
    ),
    CallFormat("gigachat", "json", ("<|function_call|>",), signs=("<|function_call|>",), ends_thought=True),
    _LFM2,
    replace(_LFM2, signs=("tools", "List of tools: <|tool_list_start|>")),
    replace(_LFM2, signs=("tools", "List of tools: [")),
    _PYTHONIC,
    HERMES,
    CallFormat("llama3", "json", bare="{", arguments_key="parameters", between="; ", signs=("tools", '"parameters":')),
)  # fmt: skip


def format_of(template: str) -> CallFormat:
    """Return the format that a template's source uses, or Hermes if it uses no known format."""
    return next((form for form in FORMATS if all(sign in template for sign in form.signs)), HERMES)
