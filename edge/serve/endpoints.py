"""All endpoints of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from edge.serve.apis import devices, state, tokens
from edge.serve.apis.adapters import AdapterScales, adapter_list, check_no_adapter, use_adapters
from edge.serve.apis.api import Api
from edge.serve.apis.chat import CHAT, ChatRequest
from edge.serve.apis.completions import COMPLETIONS
from edge.serve.apis.embeddings import EmbeddingsRequest, embeddings
from edge.serve.apis.infill import INFILL
from edge.serve.apis.messages import MESSAGES
from edge.serve.apis.messages_fields import MessagesInput
from edge.serve.apis.metrics import metrics
from edge.serve.apis.models import ModelRequest, cancel_fetch, fetches, load, model_json, model_list, unload
from edge.serve.apis.native import NATIVE, NativeEmbeddingsRequest, native_embeddings
from edge.serve.apis.rerank import RerankRequest, rerank
from edge.serve.apis.responses import RESPONSES
from edge.serve.caller import check_administrator
from edge.serve.devices.devices import ServedDevices
from edge.serve.http.bodies import Json, unless_gone
from edge.serve.http.generating import answer
from edge.serve.http.openapi import Endpoint, openapi
from edge.serve.http.security import namespace_of
from edge.serve.oip.endpoints import oip_endpoints
from edge.serve.oip.networks import Networks
from edge.serve.ollama.endpoints import ollama_endpoints
from edge.serve.options import ServeOptions
from edge.serve.planning.api import FrontRequest, Planning, PlanRequest
from edge.serve.served import ServedModel, ServedModels
from edge.serve.warming import api as prefixes

ANSWERING: tuple[Api[Any], ...] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, NATIVE, INFILL)
# Further paths that clients of llama.cpp's server use.
ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/responses": "/v1/responses",
    "/completions": "/completion",
    "/models": "/v1/models",
    "/models/load": "/v1/models/load",
    "/models/unload": "/v1/models/unload",
    "/embeddings": "/embedding",
    **dict.fromkeys(("/rerank", "/reranking", "/v1/reranking"), "/v1/rerank"),
}
HEALTH = ("/health", "/v1/health", "/healthz", "/livez", "/ping", "/readyz")
R = TypeVar("R", bound=BaseModel)


def endpoints(
    models: ServedModels, options: ServeOptions, served_devices: ServedDevices, networks: Networks | None = None
) -> list[Endpoint]:
    """Return all endpoints. networks: the ONNX networks of the server, if it has any."""

    async def prometheus(_http: Request) -> Response:
        figures = networks.figures() if networks is not None else ()
        return Response(metrics(await state.statuses(models), figures), media_type=CONTENT_TYPE_LATEST)

    async def health(_http: Request) -> Response:
        states = state.health(models)
        return Json(states, 200 if states["status"] == "ok" else 503)

    async def description(_http: Request) -> dict[str, Any]:
        return openapi(served)

    planning = Planning(models, options, served_devices)

    async def plan(http: Request, request: PlanRequest) -> dict[str, Any]:
        return await unless_gone(http, planning.use_plan(request))

    async def make_front(_http: Request, request: FrontRequest) -> Response:
        return await planning.make_front(request)

    async def front(http: Request) -> Any:
        return await planning.front(http.query_params.get("model"))

    async def invite(_http: Request, request: devices.InvitationRequest) -> dict[str, Any]:
        check_administrator("invite a device")
        return await devices.invite(request, served_devices)

    async def change_device(http: Request, request: devices.DeviceRequest) -> dict[str, Any]:
        check_administrator("pause or resume a device")
        return await devices.change(http.path_params["name"], request, models, served_devices)

    async def remove_device(http: Request) -> dict[str, Any]:
        check_administrator("remove a device")
        revoke = http.query_params.get("revoke", "").lower() in ("true", "1")
        return await devices.remove(http.path_params["name"], models, served_devices, revoke=revoke)

    async def props(http: Request) -> dict[str, Any]:
        return await state.props(models, http.query_params.get("model"))

    async def one_model(http: Request) -> dict[str, Any]:
        return await model_json(models, http.path_params["name"])

    async def load_model(http: Request, request: ModelRequest) -> dict[str, Any]:
        return await unless_gone(http, load(request, models))

    async def unload_model(_http: Request, request: ModelRequest) -> dict[str, Any]:
        return await unload(request, models)

    async def cancel_pull(http: Request) -> dict[str, Any]:
        return await cancel_fetch(http.path_params["name"], models)

    async def ask_memory(_http: Request, request: state.MemoryRequest) -> dict[str, Any]:
        check_administrator("change the memory of the models")
        return await state.ask_memory(request, models)

    async def lora(_http: Request, request: AdapterScales) -> dict[str, Any]:
        return await use_adapters(request, models)

    async def announced(http: Request) -> dict[str, Any]:
        return await prefixes.announced(models, namespace_of(http.scope))

    async def announce(http: Request, request: prefixes.PrefixRequest) -> dict[str, Any]:
        return await unless_gone(http, prefixes.announce(request, models, namespace_of(http.scope)))

    async def forget(http: Request) -> dict[str, Any]:
        return await prefixes.forget(http.path_params["name"], models, namespace_of(http.scope))

    def get(path: str, summary: str, answer: Callable[[], Awaitable[Any]]) -> Endpoint:
        return Endpoint("GET", path, summary, lambda _http: answer())

    def post(path: str, summary: str, request: type[R], answer: Callable[[R, ServedModel], Awaitable[Any]]) -> Endpoint:
        """Return an endpoint whose request may name the model that answers it."""

        async def work(parsed: R) -> Any:
            name = models.resolve(getattr(parsed, "model", None))
            if request in (EmbeddingsRequest, NativeEmbeddingsRequest, RerankRequest):
                check_no_adapter(name, models)
            return await answer(parsed, await models.model(name))

        return Endpoint("POST", path, summary, lambda http, parsed: unless_gone(http, work(parsed)), request)

    count, native = "/v1/messages/count_tokens", "Embed texts, in the form of llama.cpp's server."
    adapters = "List the adapters and their default scales."
    status, one_device = "Get the status of the loaded models and of all devices.", "/v1/cluster/devices/{name:path}"
    served = [
        *(
            Endpoint("POST", api.path, api.summary, partial(answer, api, models, ping_s=options.ping_s), api.request)
            for api in ANSWERING
        ),
        post(count, "Count the tokens of a conversation.", MessagesInput, tokens.count_tokens),
        post("/v1/embeddings", "Embed texts.", EmbeddingsRequest, embeddings),
        post("/v1/rerank", "Score documents for a query.", RerankRequest, rerank),
        post("/embedding", native, NativeEmbeddingsRequest, native_embeddings),
        post("/tokenize", "Tokenize a text.", tokens.TokenizeRequest, tokens.tokenize),
        post("/detokenize", "Convert tokens to text.", tokens.DetokenizeRequest, tokens.detokenize),
        post("/apply-template", "Render the prompt of a chat.", ChatRequest, tokens.apply_template),
        Endpoint("POST", "/v1/plan", "Switch a model to another plan.", plan, PlanRequest),
        get("/v1/memory", "Get the memory shares of the models.", lambda: state.memory(models)),
        Endpoint("POST", "/v1/memory", "Change the memory limit of the models.", ask_memory, state.MemoryRequest),
        Endpoint("POST", "/v1/prefixes", "Announce a prefix of future prompts.", announce, prefixes.PrefixRequest),
        Endpoint("GET", "/v1/prefixes", "List the announced prefixes.", announced),
        Endpoint("DELETE", "/v1/prefixes/{name}", "Delete an announced prefix.", forget),
        get("/v1/models", "List the models.", lambda: model_list(models)),
        Endpoint("POST", "/v1/models/load", "Load a model.", load_model, ModelRequest),
        Endpoint("POST", "/v1/models/unload", "Unload a model.", unload_model, ModelRequest),
        get("/v1/pulls", "List the downloads of models.", lambda: fetches(models)),
        Endpoint("DELETE", "/v1/pulls/{name:path}", "Cancel the download of a model.", cancel_pull),
        Endpoint("GET", "/v1/models/{name:path}", "Describe a model.", one_model),
        get("/v1/cluster", status, lambda: devices.cluster(models, served_devices)),
        Endpoint("POST", "/v1/cluster/invitations", "Invite a device.", invite, devices.InvitationRequest),
        Endpoint("POST", one_device, "Pause or resume a device.", change_device, devices.DeviceRequest),
        Endpoint("DELETE", one_device, "Remove a device, and revoke it if asked.", remove_device),
        Endpoint("GET", "/v1/front", "List the available plans.", front),
        Endpoint("POST", "/v1/front", "Make the plans of a model.", make_front, FrontRequest),
        get("/v1/advice", "List published models that fit the devices.", planning.advice),
        Endpoint("GET", "/props", "Get the properties of a model (default: the first).", props),
        get("/lora-adapters", adapters, lambda: adapter_list(models)),
        Endpoint("POST", "/lora-adapters", "Change the default scales of adapters.", lora, AdapterScales),
        get("/slots", "List the answers being generated.", lambda: state.slots(models)),
        *(Endpoint("GET", path, "Check the health of the models.", health) for path in HEALTH),
        *ollama_endpoints(models),
        *(oip_endpoints(networks) if networks is not None else ()),
        Endpoint("GET", "/metrics", "Get metrics for Prometheus.", prometheus),
        Endpoint("GET", "/openapi.json", "Get this description.", description),
    ]
    by_path = {endpoint.path: endpoint for endpoint in served}
    served += [replace(by_path[usual], path=path) for path, usual in ALIASES.items()]
    return served
