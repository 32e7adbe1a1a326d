"""Configuration of a language model: how to load it, and on which devices. Plain values that cross as JSON.

Commands and the server load models by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # the server makes configurations, and loads nothing of what computes
    from edge.api.cluster import Parallel
    from edge.deployment.deployed import DeployedModel
    from edge.llm.engine import Accounted
    from edge.llm.interface import TextEngine
    from edge.llm.options import EngineOptions
    from edge.llm.step_budget import LatencyTargets
    from edge.multimodal.encoder import MediaEncoder
    from edge.speculate.factory import Draft
    from edge.tasks import Steps

MediaUrls = Literal["", "public", "all"]
"""Addresses that pictures and sounds are fetched from by URLs in requests. "": none. public: those of the internet.
all: also those of this network and this machine."""

FULL_REQUESTS = 4  # requests of the model's full context that have room at once, if no context is given


class LoadedModel(NamedTuple):
    """A model that is loaded, here or on several devices."""

    engine: TextEngine
    deployed: DeployedModel | None  # None: this device alone
    draft: Draft  # what drafts for it


@dataclass(frozen=True)
class EngineConfig:
    """A model, how to load it, and on which devices."""

    path: str  # of the model's file
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineOptions except prefixes
    prefix_cache: int | None = None  # bytes on disk; None: the default; 0: no cache
    workers: tuple[str, ...] = ()  # addresses of the other devices; empty: this one alone, unless a plan names some
    plan: Mapping[str, Any] | None = None  # JSON of a plan, in place of workers
    plan_name: str = "the plan"  # where that one is from, for people
    save_plan: str | None = None  # file to write the plan to
    joining: bool = False  # whether workers of the cluster that are found later take part, too
    parallel: Parallel = "auto"
    shares: tuple[float, ...] | None = None
    affinity: tuple[int, ...] = ()  # cores that this process keeps to, for a saved plan
    transport: str = "auto"
    allreduce: str = "auto"
    wire: str = "f32"
    insecure: bool = False
    draft: str = "off"  # source of drafts, as in `edge.speculate.factory.drafts`
    draft_worker: str | None = None  # address of the device with the draft model; None: this one
    target_itl_ms: float | None = None  # between two tokens of an answer, beside prompts of others
    target_ttft_ms: float | None = None  # from a request to its first token
    reproducible: bool = False  # whether a request gives the same tokens whatever was computed before
    think: int = -1  # tokens of thoughts, for requests that do not say, as `edge.thinking.format.AUTO` says
    system: str = ""  # system prompt of chats that have none
    prefix_warming: float = 0.0  # seconds of an hour that prefixes may be computed for while nobody asks; 0: never
    spm_infill: bool = False  # whether prompts to fill a gap have the suffix first
    mmproj: str | None = None  # file of the projector of pictures and sounds; None: none
    encoder: str = "auto"  # where it runs: "auto", "here", or the address of a worker
    media_urls: MediaUrls = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration that `to_json` wrote."""
        lists: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})

    def drafts(self, steps: Steps) -> Draft:
        """Return the source of drafts; a draft model is fetched or made where it has to be. The errors of `drafts`."""
        from edge.errors import EngineError
        from edge.speculate.factory import MtpDraft, drafts

        draft = drafts(self.draft, self.path, steps, worker=self.draft_worker, insecure=self.insecure)
        if self.mmproj is None or not isinstance(draft, MtpDraft):
            return draft
        if not draft.is_auto:
            raise EngineError("layers that predict tokens see no pictures; use other drafts, or no projector")
        return "auto"

    def latency_targets(self) -> LatencyTargets | None:
        """Return the targets of the server's steps; None without any."""
        from edge.llm.step_budget import LatencyTargets

        itl, ttft = (None if ms is None else ms / 1000 for ms in (self.target_itl_ms, self.target_ttft_ms))
        return None if itl is None and ttft is None else LatencyTargets(itl, ttft)

    def engine_options(self, draft: Draft = "off") -> EngineOptions:
        """Return the options of the engine. EngineError for one that is out of its range."""
        from edge.llm.options import resolve
        from edge.speculate.factory import engine_options
        from partition.model.model import ModelShape
        from quant.gguf.file import GgufFile

        own = dict(self.options)
        if self.mmproj is not None and own.get("memory") is not None:  # the process that encodes has it
            own["reserved"] = own.get("reserved", 0) + Path(self.mmproj).stat().st_size
        options = engine_options(draft, prefix_cache=self.prefix_cache, reproducible=self.reproducible, **own)
        if options.context is not None or options.memory is not None:
            return options
        # Requests share the context, and few of them have the full length.
        alone, _, _ = resolve(options, ModelShape.from_gguf(GgufFile.open(self.path)))
        return replace(options, context=alone * min(options.sequences, FULL_REQUESTS))

    @contextmanager
    def loaded(
        self, steps: Steps, accounted: Accounted | None = None, *, resumes: bool = False
    ) -> Iterator[LoadedModel]:
        """Load the model, until the end of the block. accounted: as of `Engine`, on this device alone. resumes: as of
        `deployed`. The errors of `drafts`, Engine, `plan` and `deploy`."""
        from edge.llm.engine import load

        draft = self.drafts(steps)
        options = self.engine_options(draft)
        if self.workers or self.plan is not None:
            with self.deployed(options, steps, resumes=resumes) as model:
                yield LoadedModel(model.engine, model, draft)
        else:
            with load(Path(self.path), options, steps, accounted) as engine:
                yield LoadedModel(engine, None, draft)

    @contextmanager
    def deployed(self, options: EngineOptions, steps: Steps, *, resumes: bool = False) -> Iterator[DeployedModel]:
        """Deploy the model on its devices with these options, until the end of the block. resumes: it ran before, and
        devices that cannot be reached now count as lost. The errors of `plan` and `deploy`."""
        from edge.api.cluster import plan as plan_model
        from edge.cluster.deployment import Exchange
        from edge.cluster.fleet import device
        from edge.cluster.roster import announced
        from edge.deployment.deploy import Resilience, deploy
        from edge.deployment.reproducible import check_reproducible
        from edge.planning.choice import PlanChoice
        from edge.planning.choose import work_options
        from edge.survey.cluster import Cluster
        from partition.plan.plan import Plan

        path, plan = Path(self.path), None if self.plan is None else Plan.from_json(dict(self.plan))
        if self.reproducible:
            check_reproducible(plan, self.parallel, self.shares)
        workers = self.workers if plan is None else (*plan.devices[1:], *plan.all_devices[1:])
        if resumes:
            workers = tuple(dict.fromkeys(map(device, workers)))
        with Cluster(workers, insecure=self.insecure, needs_all=not resumes) as cluster:
            if plan is not None:
                choice = PlanChoice(path, plan, f"as {self.plan_name} says")
            else:
                work = replace(
                    work_options(path, options, self.transport, self.wire),
                    projector=Path(self.mmproj) if self.mmproj is not None else None,
                    encoder=self.encoder,
                    encoder_timed=False,  # beside one that is named: this device may have no room for it
                )
                choice = plan_model(
                    path, cluster, parallel=self.parallel, shares=self.shares, options=work, steps=steps
                )
            own = {name: self.options.get(name) for name in ("threads", "gpu_layers", "memory")}
            choice = choice.with_own(affinity=self.affinity or None, **own)
            if self.save_plan is not None:
                choice.save(self.save_plan)
            exchange = Exchange(self.transport, self.allreduce, self.wire)
            resilience = Resilience(announced if self.joining else None, self.reproducible, resumes)
            with deploy(choice, cluster, options, exchange, resilience, steps=steps) as model:
                yield model


@contextmanager
def media_encoder(config: EngineConfig, engine: TextEngine, steps: Steps) -> Iterator[MediaEncoder | None]:
    """Yield the encoder of pictures and sounds, on this device or on a worker, until the end of the block; None
    without a projector. MediaError, ModelFileError; the errors of `encoder_device`."""
    if config.mmproj is None:
        yield None
        return
    from edge.multimodal.encoder import MediaEncoder
    from partition.plan.plan import LOCAL, Plan

    path, mmproj, threads = Path(config.path), Path(config.mmproj), engine.threads
    workers = config.workers if config.plan is None else Plan.from_json(dict(config.plan)).devices
    workers = tuple(address for address in workers if address != LOCAL)
    with ExitStack() as stack:
        device = None
        if config.encoder not in ("auto", "here") or (config.encoder == "auto" and workers):
            from edge.helpers.encoding import EncoderFiles
            from edge.planning.encoder_place import encoder_device

            device = stack.enter_context(
                encoder_device(
                    config.encoder, EncoderFiles.open(path, mmproj), workers,
                    insecure=config.insecure, threads=threads, steps=steps,
                )
            )  # fmt: skip
        yield stack.enter_context(MediaEncoder(path, mmproj, threads=threads, device=device))
