"""/v1/plan, /v1/front and /v1/advice: how a model runs on devices, and which models fit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.responses import Response, StreamingResponse

from edge.serve.apis.fields import Fields, JsonObject
from edge.serve.apis.models import model_of
from edge.serve.apis.state import statuses
from edge.serve.caller import check_administrator
from edge.serve.devices.devices import ServedDevices
from edge.serve.http.errors import BadRequest
from edge.serve.options import ServeOptions
from edge.serve.plan_devices import checked_plan
from edge.serve.planning.advice import Advice
from edge.serve.planning.fronts import Fronts
from edge.serve.planning.preview import alone, preview
from edge.serve.served import ServedModels
from partition.plan.plan import Plan


class PlanRequest(Fields):
    model: str | None = None
    plan: JsonObject = Field(description="plan in the form of `edge plan --json` or `edge pareto --json`")
    preview: bool | None = Field(None, description="return what would change, without a change")


class FrontRequest(Fields):
    model: str | None = None


class Planning:
    """The plans and the advice of one server. Use it in one event loop."""

    def __init__(self, models: ServedModels, options: ServeOptions, devices: ServedDevices) -> None:
        self._models, self._options, self._devices = models, options, devices
        self._fronts, self._advice = Fronts(models, options.front, self._workers), Advice()

    async def _workers(self) -> Sequence[str]:
        """Return the addresses of the workers that plans may use: those of the options and members of the cluster."""
        return await self._devices.addresses()

    async def use_plan(self, request: PlanRequest) -> dict[str, Any]:
        """Switch a model to a plan, or return what that would change.

        Raises PlanError, and NotAllowed for a device that is in neither the options nor a front, and is no member.
        """
        devices = {*self._options.devices, *await self._workers(), *await self._fronts.devices()}
        if request.preview:
            return await self._preview(request, devices)
        check_administrator("run a model by another plan")
        await self._models.use_plan(request.model, request.plan, devices)
        return {"status": "ok"}

    async def _preview(self, request: PlanRequest, devices: set[str]) -> dict[str, Any]:
        models = self._models
        plan = checked_plan(request.plan, devices)
        name = model_of(request.model, models)
        config = models.configs[name]
        before = config.plan or await self._running(name)
        now = alone(plan) if before is None else Plan.from_json(dict(before))
        if now.sizes != plan.sizes:
            raise BadRequest(
                f"the plan is for another model than {name}; make plans for it with POST /v1/front", "plan"
            )
        front = await self._fronts.get(name)
        return {"model": name, **await asyncio.to_thread(preview, Path(config.path), plan, now, front)}

    async def _running(self, name: str) -> Mapping[str, Any] | None:
        """Return the plan of a loaded model, or None for one device."""
        states = [state for state in await statuses(self._models) if state["model"]["name"] == name]
        plan: Mapping[str, Any] | None = states[0].get("plan") if states else None
        return plan

    async def front(self, model: str | None) -> Any:
        """Return a front, see `Fronts.get`. model: None: the newest. Raises UnknownModel."""
        return await self._fronts.get(None if model is None else model_of(model, self._models))

    async def make_front(self, request: FrontRequest) -> Response:
        """Make a front, and stream lines of progress. Raises the errors of `Fronts.make`."""
        return StreamingResponse(self._fronts.make(request.model), media_type="application/x-ndjson")

    async def advice(self) -> dict[str, Any]:
        """Return the models that fit the devices of this server, see `Advice.get`."""
        models = self._models
        configs = [models.configs[name] for name in models.names[:1]]
        return await self._advice.get(
            {
                "devices": await self._workers(),
                "insecure": any(config.insecure for config in configs),
                "threads": next((config.options.threads for config in configs), None),
                "memory": self._options.memory,
            }
        )
