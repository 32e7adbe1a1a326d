"""/v1/files and /v1/batches of OpenAI's API."""

from __future__ import annotations

import asyncio
import email
from collections.abc import Callable, Sequence
from email.message import Message
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from edge.serve.apis.fields import Fields, at_most
from edge.serve.batches.lines import MAX_LINES, count_lines
from edge.serve.batches.runner import ENDPOINTS, BatchRunner
from edge.serve.batches.store import LASTS_S, Batch, StoredFile
from edge.serve.http.bodies import read_body
from edge.serve.http.errors import BadRequest
from edge.serve.http.openapi import Endpoint
from edge.serve.http.security import namespace_of, owner_of

LEAST_LASTS_S = 3600
MAX_NAME = 255  # characters of a file's name
MAX_HEAD = 8192  # bytes of the headers of a form's part
MOST_PARTS = 32  # of a form, with its end
MOST_LISTED = 100
T = TypeVar("T")
Seconds = Annotated[int, Field(ge=LEAST_LASTS_S, le=LASTS_S)]


class ExpiresAfter(Fields):
    anchor: Literal["created_at"] = "created_at"
    seconds: Seconds


class BatchRequest(Fields):
    input_file_id: str
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], at_most(16)] | None = None
    output_expires_after: ExpiresAfter | None = None


def batch_endpoints(runner: BatchRunner) -> list[Endpoint]:
    """Return the endpoints of files and batches."""
    store = runner.store

    async def upload(http: Request) -> dict[str, Any]:
        filename, content, fields = await _form(http)
        purpose = fields.get("purpose", "")
        if purpose != "batch":
            raise BadRequest(f"purpose needs to be batch; got {purpose!r:.80}", "purpose")
        lasts_s = _seconds(fields.get("expires_after[seconds]"))
        await runner.do(store.sweep)
        stored = await runner.do(store.add_file, owner_of(http.scope), filename, purpose, content, lasts_s)
        return stored.to_json()

    async def files(http: Request) -> dict[str, Any]:
        await runner.do(store.sweep)
        purpose = http.query_params.get("purpose")
        every = await runner.do(store.files, owner_of(http.scope))
        if http.query_params.get("order") == "asc":
            every.reverse()
        return _listed(http, [file for file in every if purpose in (None, file.purpose)])

    async def named(http: Request, work: Callable[[str, str], T]) -> T:
        return await runner.do(work, owner_of(http.scope), http.path_params["name"])

    async def file(http: Request) -> dict[str, Any]:
        return (await named(http, store.file)).to_json()

    async def content(http: Request) -> Response:
        stored = await named(http, store.file)
        return Response(await runner.do(store.content, stored), media_type="application/octet-stream")

    async def delete(http: Request) -> dict[str, Any]:
        await named(http, store.delete_file)
        return {"id": http.path_params["name"], "object": "file", "deleted": True}

    async def create(http: Request, request: BatchRequest) -> dict[str, Any]:
        if request.endpoint not in ENDPOINTS:
            raise BadRequest(f"endpoint needs to be one of {', '.join(ENDPOINTS)}", "endpoint")
        stored = await runner.do(store.file, owner_of(http.scope), request.input_file_id)
        total = await asyncio.to_thread(count_lines, await runner.do(store.content, stored))
        if not 0 < total <= MAX_LINES:
            raise BadRequest(f"a batch has 1 to {MAX_LINES} requests; this file has {total}", "input_file_id")
        lasts_s = request.output_expires_after.seconds if request.output_expires_after else LASTS_S
        arguments = (namespace_of(http.scope), request.endpoint, total, request.metadata, lasts_s)
        batch = await runner.do(store.add_batch, stored, *arguments)
        runner.start()
        return batch.to_json()

    async def batches(http: Request) -> dict[str, Any]:
        await runner.do(store.sweep)
        return _listed(http, await runner.do(store.batches, owner_of(http.scope)))

    async def batch(http: Request) -> dict[str, Any]:
        return (await named(http, store.batch)).to_json()

    async def cancel(http: Request) -> dict[str, Any]:
        stored = await named(http, store.batch)
        await runner.do(store.cancel, stored)
        runner.start()
        return stored.to_json()

    return [
        Endpoint("POST", "/v1/files", "Keep a file of requests.", upload),
        Endpoint("GET", "/v1/files", "Tell which files there are.", files),
        Endpoint("GET", "/v1/files/{name}", "Tell of one file.", file),
        Endpoint("GET", "/v1/files/{name}/content", "Give the content of a file.", content),
        Endpoint("DELETE", "/v1/files/{name}", "Delete a file.", delete),
        Endpoint("POST", "/v1/batches", "Answer the requests of a file while nobody else asks.", create, BatchRequest),
        Endpoint("GET", "/v1/batches", "Tell which batches there are.", batches),
        Endpoint("GET", "/v1/batches/{name}", "Tell how far a batch is.", batch),
        Endpoint("POST", "/v1/batches/{name}/cancel", "Answer no more of a batch.", cancel),
    ]


def _listed(http: Request, stored: Sequence[StoredFile | Batch]) -> dict[str, Any]:
    """Return a page of a list: `limit` items behind the one that `after` names. BadRequest."""
    text = http.query_params.get("limit", "20")
    if not text.isdecimal() or int(text[:9]) < 1:
        raise BadRequest(f"limit needs a number from 1; got {text[:80]!r}", "limit")
    after = http.query_params.get("after")
    ids = [item.id for item in stored]
    if after is not None and after not in ids:
        raise BadRequest(f"after names nothing here: {after[:80]!r}", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = stored[start : start + min(int(text[:9]), MOST_LISTED)]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {
        "object": "list",
        "data": [item.to_json() for item in page],
        **ends,
        "has_more": start + len(page) < len(ids),
    }


def _seconds(text: str | None) -> int:
    """Return for how long a file stays. BadRequest."""
    if text is None:
        return LASTS_S
    if not text.isdecimal() or not LEAST_LASTS_S <= int(text[:9]) <= LASTS_S:
        raise BadRequest(
            f"expires_after needs {LEAST_LASTS_S} to {LASTS_S} seconds; got {text[:80]!r}", "expires_after"
        )
    return int(text)


async def _form(http: Request) -> tuple[str, bytes, dict[str, str]]:
    """Return the file of a form, its name, and the other fields. BadRequest; HTTPException if it does not arrive.

    Starlette's own parser writes large files to the disk as they are.
    """
    kind, body = http.headers.get("content-type", ""), await read_body(http)
    if not kind.startswith("multipart/form-data"):
        raise BadRequest("a file is uploaded as multipart/form-data, with the fields purpose and file", "file")
    return await asyncio.to_thread(_parsed, kind, body)


def _parsed(kind: str, body: bytes) -> tuple[str, bytes, dict[str, str]]:
    """Return what `_form` does. The parts are split here: the parser of mails takes minutes for many, and its errors
    are many, too."""
    form = Message()
    form["Content-Type"] = kind
    boundary = f"\r\n--{form.get_param('boundary') or ''}".encode("latin-1", "replace")
    _, *parts = (b"\r\n" + body).split(boundary, MOST_PARTS)
    file: tuple[str, bytes] | None = None
    fields: dict[str, str] = {}
    for part in parts[:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        headers = email.message_from_string(head[:MAX_HEAD].decode(errors="replace").lstrip("\r\n"))
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise BadRequest("a part of the form has no name", "file")
        if name == "file":
            file = (headers.get_filename() or "file")[:MAX_NAME], content
        else:
            fields[name] = content.decode(errors="replace")
    if file is None or not parts[-1].startswith(b"--"):
        raise BadRequest(f"the form has no file, more than {MOST_PARTS - 1} parts, or was cut off", "file")
    return (*file, fields)
