"""Endpoints of the Open Inference Protocol over HTTP."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from edge.serve.http.bodies import Json, in_thread_if_large, read_body, unless_gone, utf8
from edge.serve.http.openapi import Endpoint
from edge.serve.oip.framing import HEADER, encoded, parse
from edge.serve.oip.networks import Networks

LIVE, READY = "/v2/health/live", "/v2/health/ready"


class IndexRequest(BaseModel):
    """Body of a request for the index of the repository."""

    ready: bool = False


def oip_endpoints(networks: Networks) -> list[Endpoint]:
    """Return the endpoints of a server with networks."""

    async def live(_http: Request) -> Response:
        return Response()

    async def ready(_http: Request) -> Response:
        return Response(status_code=200 if networks.is_ready else 503)

    async def server(_http: Request) -> dict[str, Any]:
        return networks.metadata()

    async def model(http: Request) -> dict[str, Any]:
        network = networks.network(*_name(http))
        await network.loaded()
        return network.metadata()

    async def model_ready(http: Request) -> Response:
        return Response(status_code=200 if networks.network(*_name(http)).process.is_ready else 503)

    async def statistics(http: Request) -> dict[str, Any]:
        return networks.statistics(*_name(http))

    async def all_statistics(_http: Request) -> dict[str, Any]:
        return networks.statistics()

    async def index(http: Request) -> Response:
        body = utf8(await read_body(http))
        request = IndexRequest.model_validate_json(body) if body.strip() else IndexRequest()
        return Json(networks.index(ready=request.ready))

    async def infer(http: Request) -> Response:
        networks.network(*_name(http))
        body = await read_body(http)
        json_length = http.headers.get(HEADER)
        n_bytes = len(body)
        if json_length is not None and json_length.isdecimal():
            n_bytes = min(n_bytes, int(json_length[:20]))  # only the JSON takes time
        request = await in_thread_if_large(n_bytes, lambda: parse(body, json_length))
        response = await unless_gone(http, networks.infer(*_name(http), request))
        n_bytes = sum(len(output.data) for output in response.outputs if not request.is_binary(output.name))
        content, length = await in_thread_if_large(n_bytes, lambda: encoded(request, response))
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={HEADER: str(length)}, media_type="application/octet-stream")

    def of_model(method: Any, end: str, summary: str, answer: Any) -> list[Endpoint]:
        """Return the endpoint of a network, with and without a version."""
        paths = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
        return [Endpoint(method, path + end, summary, answer) for path in paths]

    return [
        Endpoint("GET", "/v2", "Describe the server of networks.", server),
        Endpoint("GET", LIVE, "Check whether the server runs.", live),
        Endpoint("GET", READY, "Check whether all networks are loaded.", ready),
        Endpoint("POST", "/v2/repository/index", "List the networks.", index),
        Endpoint("GET", "/v2/models/stats", "Get the statistics of all networks.", all_statistics),
        *of_model("GET", "", "Describe a network.", model),
        *of_model("GET", "/ready", "Check whether a network is loaded.", model_ready),
        *of_model("GET", "/stats", "Get the statistics of a network.", statistics),
        *of_model("POST", "/infer", "Compute a network.", infer),
    ]


def _name(http: Request) -> tuple[str, str]:
    """Return the name and the version of the network in a path."""
    return http.path_params["name"], http.path_params.get("version", "")
