"""Formats in which models write function calls, and which of them a template uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """Format of calls in an answer: `opens` JSON `closes`, where the JSON is a call, or a list of calls."""

    name: str
    opens: str  # mark before calls; empty: calls come only at the start of an answer
    closes: str
    bare: str  # start of JSON of calls that begin an answer without `opens`; empty: they need it
    arguments: str  # key of the arguments
    is_list: bool = False
    between: str = ""  # separator of two calls


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", "", "arguments", between="\n")
LLAMA3 = CallFormat("llama3", "", "", "{", "parameters", between="; ")
# If the token [TOOL_CALLS] is a control token, it has no text.
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", "[{", "arguments", is_list=True, between=", ")


def format_of(template: str) -> CallFormat:
    """Return the format that a template's source uses; Hermes if it uses no known one."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and '"parameters":' in template and "tools" in template:
        return LLAMA3
    return HERMES


def renders_tools(template: str) -> bool:
    """Return whether a template puts tools into the prompt itself."""
    return "tools" in template
