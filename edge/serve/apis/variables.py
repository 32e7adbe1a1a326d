"""Variables that a request gives to the model's chat template, and its options for reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

from edge.serve.http.errors import BadRequest
from edge.serve.tools.functions import json_text
from edge.templates.template import RESERVED

MAX_VARIABLES = 64
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
TemplateVariables = Annotated[dict[Name, JsonValue], Field(max_length=MAX_VARIABLES)]


def template_variables(
    template: str, given: Mapping[str, Any] | None, effort: str | None = None, thinking: str | None = None
) -> dict[str, Any]:
    """Return the variables of a request, and its options for reasoning, as the template of this source uses them.
    BadRequest if the template has no such option, and for a name that every template has."""
    variables = dict(given or {})
    if reserved := sorted(RESERVED & variables.keys()):
        raise BadRequest(f"{', '.join(reserved)}: the template has it from the request", "chat_template_kwargs")
    json_text(variables, "chat_template_kwargs")
    if effort is not None and "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", effort)
    elif effort not in (None, "none"):
        raise BadRequest("this model's chat template knows no reasoning_effort; leave it out", "reasoning_effort")
    enable_thinking = {"enabled": True, "disabled": False}.get(thinking or "", None if effort != "none" else False)
    if enable_thinking is not None and "enable_thinking" in template:
        variables.setdefault("enable_thinking", enable_thinking)
    elif enable_thinking:
        raise BadRequest("this model's chat template knows no thinking; leave it out", "thinking")
    return variables
