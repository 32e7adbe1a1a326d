"""What a served model is, and where its parts are: plain values for clients and the page."""

from __future__ import annotations

from typing import Any

import psutil

from edge.llm.interface import TextEngine
from edge.parallel.engine import DistributedEngine
from edge.parallel.surviving import SurvivingEngine
from edge.planning.deployed import Deployed


def engine_status(engine: TextEngine, deployed: Deployed | None, template: str) -> dict[str, Any]:
    """The keys `model`, `devices`, `plan` and `why` of ServedModel.status. template: of chats, as Jinja."""
    shape, rss_bytes = engine.shape, psutil.Process().memory_info().rss
    model = {
        "name": shape.name or engine.path.stem,
        "path": engine.path.name,
        "architecture": shape.architecture,
        "context": engine.context,
        "trained_context": shape.context_length,
        "sequences": engine.sequences,
        "vocabulary": engine.model.n_vocab,
        "parameters": shape.n_params,
        "size_bytes": engine.file.size_bytes,
        "chat_template": template,
        "embeds": deployed is None and engine.paging is None,
    }
    if deployed is None:
        heads = max(shape.n_heads, default=0)
        own = {"name": "this device", "rank": 0, "layers": [0, shape.n_layers], "heads": [0, heads]}
        devices = [{**own, "memory_bytes": rss_bytes, "link": None}]
        return {"model": model, "devices": devices, "plan": None, "why": "one device"}
    current = engine.current if isinstance(engine, SurvivingEngine) else engine
    links = current.links if isinstance(current, DistributedEngine) else {}
    devices = []
    for rank, name in enumerate(deployed.names):
        held = deployed.plan.slice(rank)
        devices.append(
            {
                "name": name,
                "rank": rank,
                "layers": [held.layers.start, held.layers.stop],
                "heads": [held.heads.start, held.heads.stop],
                "memory_bytes": rss_bytes if rank == 0 else None,
                "link": links.get(rank),
            }
        )
    return {"model": model, "devices": devices, "plan": deployed.plan.to_json(), "why": deployed.why}
