"""How models write calls of functions, and which of it a template teaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """How calls look in an answer: `opens` JSON `closes`, where the JSON is a call, or a list of calls."""

    name: str
    opens: str  # what begins calls anywhere; empty: they stand only at the start of an answer
    closes: str
    bare: str  # how JSON of calls begins that stands at the start without `opens`; empty: it does not
    arguments: str  # the key of the arguments
    is_list: bool = False
    between: str = ""  # stands between two calls


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", "", "arguments", between="\n")
LLAMA3 = CallFormat("llama3", "", "", "{", "parameters", between="; ")
# The token [TOOL_CALLS] has no text where it is a control token.
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", "[{", "arguments", is_list=True, between=", ")


def format_of(template: str) -> CallFormat:
    """The format that a template's source teaches; Hermes where it teaches none that is known."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and '"parameters":' in template and "tools" in template:
        return LLAMA3
    return HERMES


def renders_tools(template: str) -> bool:
    """Whether a template puts tools into the prompt itself."""
    return "tools" in template
