"""/infill in the form of llama.cpp's server, for editor plug-ins."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from edge.serve.apis.api import Api, ParsedRequest
from edge.serve.apis.fields import Fields, Items, repeated
from edge.serve.apis.native import NativeRequest, events, fold, generation_of
from edge.serve.apis.openai_fields import error_event
from edge.serve.http.errors import BadRequest
from edge.serve.served import ExtraFile, Infill

MAX_FILES, MAX_NAME = 1024, 1024


class ExtraContext(Fields):
    text: str
    filename: str = Field("tmp", max_length=MAX_NAME)


class InfillRequest(NativeRequest):
    input_prefix: str = Field(description="text before the gap")
    input_suffix: str = Field(description="text after the gap")
    input_extra: Items[ExtraContext] = Field([], max_length=MAX_FILES, description="parts of other files")
    prompt: str = Field("", description="beginning of the line; follows the prefix")


def parse(request: InfillRequest, _template: str) -> ParsedRequest:
    """Parse a request for one gap to n generations. Raises BadRequest."""
    if request.suffix:
        raise BadRequest("suffix is a field of /v1/completions; use input_suffix", "suffix")
    files = [ExtraFile(file.filename, file.text) for file in request.input_extra]
    infill = Infill(request.input_prefix, request.input_suffix, request.prompt, files)
    generation = replace(generation_of(request), infill=infill)
    return ParsedRequest(repeated(generation, request.n_cmpl or request.n or 1))


INFILL = Api("/infill", "Fill a gap, as llama.cpp's server has it.", InfillRequest, parse, events, fold, error_event)
