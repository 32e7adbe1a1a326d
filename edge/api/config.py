"""Configuration of a language model: how to load it, and on which devices.

Commands and the server load models from it. All values are plain, so that they can be sent as JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from edge.llm.options import DEFAULTS, EngineOptions

# The server creates configurations without loading the modules that compute.
if TYPE_CHECKING:
    from edge.api.cluster import Parallel
    from edge.deployment.deployed import DeployedModel
    from edge.deployment.kinds import OtherCopies
    from edge.llm.engine import Accounted
    from edge.llm.interface import TextEngine
    from edge.media.encoder import MediaEncoder
    from edge.speculate.factory import Draft
    from edge.tasks import Steps
    from partition.model.file import ModelFile
    from partition.plan.plan import Plan

MediaUrls = Literal["", "public", "all"]
"""Origins of picture and sound URLs in requests that the server may fetch.

"": none. "public": the internet. "all": also the local network and this machine.
"""

FULL_REQUESTS = 4  # requests at full context length that fit at the same time, if no context is specified


class LoadedModel(NamedTuple):
    """A loaded model, on this device or on several."""

    engine: TextEngine
    deployed: DeployedModel | None  # None if the model runs on this device alone
    draft: Draft  # source of drafts


@dataclass(frozen=True)
class EngineConfig:
    """A model, how to load it, and on which devices."""

    path: str  # model file
    options: EngineOptions = DEFAULTS  # without prefixes
    prefix_cache: int | None = None  # disk space in bytes; None: the default; 0: no cache
    workers: tuple[str, ...] = ()  # addresses of the other devices; if empty, those of the plan
    plan: Mapping[str, Any] | None = None  # JSON of a plan, used instead of workers
    plan_name: str = "the plan"  # origin of the plan, for messages
    save_plan: str | None = None  # file to write the plan to
    joining: bool = False  # whether workers that are discovered later join the cluster
    is_replica: bool = False  # whether other processes run further copies of the model, on other devices
    parallel: Parallel = "auto"
    shares: tuple[float, ...] | None = None
    objective: str = "latency"  # of the plan for `workers`, see `edge.planning.choose.arrange`
    affinity: tuple[int, ...] = ()  # cores that this process is pinned to, for a saved plan
    transport: str = "auto"
    allreduce: str = "auto"
    wire: str = "f32"
    insecure: bool = False
    draft: str = "off"  # source of drafts, as in `edge.speculate.factory.drafts`
    draft_worker: str | None = None  # address of the device with the draft model; None: this device
    target_itl_ms: float | None = None  # target of inter-token latency while other prompts are prefilled
    target_ttft_ms: float | None = None  # target of TTFT
    reproducible: bool = False  # whether equal requests get equal tokens regardless of earlier requests
    think: int = -1  # default thinking budget in tokens, see `edge.text.thinking_format.AUTO`
    system: str = ""  # system prompt of chats that have none
    prefix_warming: float = 0.0  # seconds per hour to compute likely prefixes while the server is idle; 0: none
    spm_infill: bool = False  # whether infill prompts put the suffix first
    mmproj: str | None = None  # projector file for pictures and sounds; None: none
    encoder: str = "auto"  # device of the encoder: "auto", "here", or a worker's address
    media_urls: MediaUrls = ""

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration that `to_json` wrote."""
        lists: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists, "options": EngineOptions(**values["options"])})

    @cached_property
    def file(self) -> ModelFile:
        """The model file, which is opened once. Raises ModelFileError."""
        from partition.model.file import ModelFile

        return ModelFile.open(self.path)

    def engine_options(self, draft: Draft = "off") -> EngineOptions:
        """Return the options of the engine. Raises EngineError if a value is out of its range."""
        from edge.llm.resolve import resolve
        from edge.speculate.factory import with_draft_and_cache

        options = self.options
        # The process that encodes media also loads the projector.
        if self.mmproj is not None and options.memory is not None:
            options = replace(options, reserved=options.reserved + Path(self.mmproj).stat().st_size)
        options = with_draft_and_cache(options, draft, prefix_cache=self.prefix_cache, reproducible=self.reproducible)
        if options.context is not None or options.memory is not None:
            return options
        # Requests share the context, and few of them use its full length.
        alone, _ = resolve(options, self.file.shape)
        return replace(options, context=alone * min(options.sequences, FULL_REQUESTS))

    @contextmanager
    def loaded(
        self,
        steps: Steps,
        accounted: Accounted | None = None,
        *,
        resumes: bool = False,
        survey_seconds: float | None = 0.0,
        left_out: Collection[str] = (),
        other_copies: OtherCopies[Plan] | None = None,
    ) -> Iterator[LoadedModel]:
        """Load the model until the end of the block.

        accounted: see `Engine`; used on this device alone.
        resumes, survey_seconds, left_out, other_copies: see `deployed`.
        Raises the errors of `drafts`, `Engine`, `plan` and `deploy`.
        """
        from edge.llm.engine import load

        draft = draft_of(self, steps)
        options = self.engine_options(draft)
        if self.workers or self.plan is not None:
            with self.deployed(
                options,
                steps,
                resumes=resumes,
                survey_seconds=survey_seconds,
                left_out=left_out,
                other_copies=other_copies,
            ) as model:
                yield LoadedModel(model.engine, model, draft)
        else:
            with load(self.file, options, steps, accounted) as engine:
                yield LoadedModel(engine, None, draft)

    @contextmanager
    def deployed(
        self,
        options: EngineOptions,
        steps: Steps,
        *,
        resumes: bool = False,
        survey_seconds: float | None = 0.0,
        left_out: Collection[str] = (),
        other_copies: OtherCopies[Plan] | None = None,
    ) -> Iterator[DeployedModel]:
        """Deploy the model on its devices with these options until the end of the block.

        resumes: the model ran before, so devices that are unreachable now count as lost.
        left_out: addresses of workers that a person leaves out.
        survey_seconds: time for measuring the devices before the start; 0: plan with estimates; None: the default.
        other_copies: runs the replicas of later plans; None: later plans have one copy.
        Raises the errors of `plan` and `deploy`.
        """
        from edge.cluster.fleet import device
        from edge.cluster.llm_ranks import Exchange
        from edge.cluster.members import address_of
        from edge.cluster.roster import announced
        from edge.deployment.deploy import Resilience, deploy
        from edge.deployment.reproducible import check_reproducible
        from edge.planning.choice import PlanChoice
        from edge.planning.choose import arrange, work_options
        from edge.profiling.cluster import Cluster
        from partition.plan.plan import Plan

        plan = None if self.plan is None else Plan.from_json(dict(self.plan))
        if self.reproducible:
            check_reproducible(plan, self.parallel, self.shares)
        workers = self.workers
        if plan is not None:
            first = plan.copies[0]
            workers = (*first.devices[1:], *first.all_devices[1:])
        unused = frozenset(map(device, left_out))
        others = tuple(worker for worker in workers if unused and device(address_of(worker)) in unused)
        if others and (plan is not None or len(others) < len(workers)):  # without a worker, none could be added later
            workers = tuple(worker for worker in workers if worker not in others)
        resumes |= bool(others)
        if resumes:
            workers = tuple(dict.fromkeys(map(device, workers)))
        with Cluster(workers, insecure=self.insecure, needs_all=not resumes) as cluster:
            if plan is not None:
                choice = PlanChoice(self.file.path, plan, f"as {self.plan_name} says", file=self.file)
            else:
                work = replace(
                    work_options(self.file, options, self.transport, self.wire),
                    projector=Path(self.mmproj) if self.mmproj is not None else None,
                    encoder=self.encoder,
                    encoder_timed=False,  # this device may have no room to time an encoder
                    survey_seconds=survey_seconds,
                )
                choice = arrange(self.file, cluster, work, self.parallel, self.shares, steps, self.objective)
            own = self.options
            choice = choice.with_own(
                threads=own.threads, gpu_layers=own.gpu_layers, memory=own.memory, affinity=self.affinity or None
            )
            if self.save_plan is not None:
                choice.save(self.save_plan)
            exchange = Exchange(self.transport, self.allreduce, self.wire)
            assert isinstance(choice.plan, Plan)
            is_replica = self.is_replica or bool(choice.plan.replicas)
            plans_copies = not self.is_replica and choice.planner is not None and other_copies is not None

            def joining() -> list[str]:
                return [*others, *(announced() if self.joining else ())]

            resilience = Resilience(
                joining if (self.joining or others) and (plans_copies or not is_replica) else None,
                self.reproducible,
                resumes,
                is_replica and choice.plan.thin_owner,
                unused,
                other_copies if plans_copies else None,
            )
            with deploy(choice, cluster, options, exchange, resilience, steps=steps) as model:
                yield model


def draft_of(config: EngineConfig, steps: Steps) -> Draft:
    """Return the source of drafts. A missing draft model is fetched or made. Raises the errors of `drafts`."""
    from edge.errors import EngineError
    from edge.speculate.factory import MtpDraft, drafts

    draft = drafts(config.draft, config.file, steps, worker=config.draft_worker, insecure=config.insecure)
    if config.mmproj is None or not isinstance(draft, MtpDraft):
        return draft
    if not draft.is_auto:
        raise EngineError("MTP layers see no pictures: choose other drafts, or leave out the projector")
    return "auto"


@contextmanager
def media_encoder(config: EngineConfig, engine: TextEngine, steps: Steps) -> Iterator[MediaEncoder | None]:
    """Yield the encoder of pictures and sounds until the end of the block, or None without a projector.

    The encoder runs on this device or on a worker. Raises MediaError, ModelFileError and the errors of
    `encoder_device`.
    """
    if config.mmproj is None:
        yield None
        return
    from edge.media.encoder import MediaEncoder
    from partition.plan.plan import LOCAL, Plan

    path, mmproj, threads = Path(config.path), Path(config.mmproj), engine.threads
    workers = config.workers if config.plan is None else Plan.from_json(dict(config.plan)).devices
    workers = tuple(address for address in workers if address != LOCAL)
    with ExitStack() as stack:
        device = None
        if config.encoder not in ("auto", "here") or (config.encoder == "auto" and workers):
            from edge.cluster.encoder_worker import EncoderFiles
            from edge.planning.encoder_place import encoder_device

            device = stack.enter_context(
                encoder_device(
                    config.encoder, EncoderFiles.open(config.file, mmproj), workers,
                    insecure=config.insecure, threads=threads, steps=steps,
                )
            )  # fmt: skip
        yield stack.enter_context(MediaEncoder(path, mmproj, threads=threads, device=device))
