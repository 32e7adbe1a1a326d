"""Configuration of an engine process: how to load a model, as plain values that cross as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the server makes configurations, and loads nothing of what computes
    from edge.deployment.deployed import DeployedModel
    from edge.llm.interface import TextEngine
    from edge.llm.options import EngineOptions
    from edge.speculate.factory import Draft
    from edge.tasks import Steps

FULL_REQUESTS = 4  # requests of the model's full context that have room at once, if no context is given


@dataclass(frozen=True)
class EngineConfig:
    """A model, how to load it, and on which devices."""

    path: str  # of the model's file
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineOptions except prefixes
    prefix_cache: int | None = None  # bytes on disk; None: the default; 0: no cache
    workers: tuple[str, ...] = ()  # addresses of the other devices; empty: this one alone, unless a plan names some
    plan: Mapping[str, Any] | None = None  # JSON of a plan, in place of workers
    joining: bool = False  # whether workers of the cluster that are found later take part, too
    parallel: str = "auto"
    shares: tuple[float, ...] | None = None
    transport: str = "auto"
    allreduce: str = "auto"
    wire: str = "f32"
    insecure: bool = False
    spare: int | str = 0  # number of losses to prepare for, or "auto"
    draft: str = "off"  # source of drafts, as in `edge.speculate.factory.drafts`
    draft_worker: str | None = None  # address of the device with the draft model; None: this one
    reproducible: bool = False  # whether a request gives the same tokens whatever was computed before

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration that `to_json` wrote."""
        shares = values["shares"]
        return cls(
            **{**values, "workers": tuple(values["workers"]), "shares": None if shares is None else tuple(shares)}
        )

    def with_draft(self, steps: Steps) -> EngineConfig:
        """Return the configuration with the file of the draft model. The errors of `drafts`."""
        from edge.speculate.factory import drafts

        return replace(self, draft=str(drafts(self.draft, self.path, steps)))

    @property
    def drafts(self) -> Draft:
        """Source of drafts for `edge.speculate.factory`, of a configuration `with_draft`."""
        from edge.speculate.factory import WorkerDraft
        from partition.predict.drafts import KINDS

        if self.draft in KINDS:
            return self.draft
        path = Path(self.draft)
        return path if self.draft_worker is None else WorkerDraft(path, self.draft_worker, self.insecure)

    def engine_options(self) -> EngineOptions:
        """Return the options of the engine. EngineError for one that is out of its range."""
        from edge.llm.options import EngineOptions, PrefixOptions, reproducible, resolve
        from edge.speculate.factory import with_room
        from partition.model.model import ModelShape
        from quant.gguf.file import GgufFile

        requested = EngineOptions(**self.options, prefixes=PrefixOptions.of(self.prefix_cache))
        requested = reproducible(requested) if self.reproducible else requested
        options = with_room(requested, self.drafts)
        if options.context is not None or options.memory is not None:
            return options
        # Requests share the context, and few of them have the full length.
        alone, _, _ = resolve(options, ModelShape.from_gguf(GgufFile.open(self.path)))
        return replace(options, context=alone * min(options.sequences, FULL_REQUESTS))

    @contextmanager
    def loaded(self, steps: Steps) -> Iterator[tuple[TextEngine, DeployedModel | None]]:
        """The model, loaded, and where it runs where that is on several devices. The errors of Engine, `plan` and
        `deploy`."""
        from edge.cluster.deployment import Exchange
        from edge.cluster.roster import announced
        from edge.deployment.deploy import Resilience, deploy
        from edge.deployment.reproducible import check_settled
        from edge.llm.engine import load
        from edge.planning.choice import PlanChoice
        from edge.planning.choose import arrange, work_options
        from edge.survey.cluster import Cluster
        from partition.plan.plan import Plan

        path, options = Path(self.path), self.engine_options()
        if not self.workers and self.plan is None:
            with load(path, options, steps) as engine:
                yield engine, None
            return
        plan = Plan.from_json(dict(self.plan)) if self.plan is not None else None
        if self.reproducible:
            check_settled(plan, self.parallel, self.shares)
        own = {name: self.options.get(name) for name in ("threads", "gpu_layers", "memory")}
        resilience = Resilience(self.spare, announced if self.joining else None, self.reproducible)
        workers = self.workers if plan is None else plan.devices[1:]
        with Cluster(workers, insecure=self.insecure, needs_all=True) as cluster:
            if plan is not None:
                choice = PlanChoice(path, plan, "as the plan says")
            else:
                work = work_options(path, options, self.transport, self.wire)
                choice = arrange(path, cluster, work, self.parallel, self.shares, steps)
            exchange = Exchange(self.transport, self.allreduce, self.wire)
            with deploy(choice.with_own(**own), cluster, options, exchange, resilience, steps=steps) as model:
                yield model.engine, model
