"""Creation of plan spaces from a model file and a cluster, for language models and ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge.cluster.encoder_worker import EncoderFiles
from edge.cluster.fleet import device
from edge.llm.options import DEFAULT_CONTEXT, EngineOptions
from edge.planning.arrange import DEPTH, measured_speeds, work_of
from edge.planning.drafted import assumed_text, draft_of
from edge.planning.encoder_place import EncoderPlace, encoder_places
from edge.planning.llm_space import LlmSpace
from edge.planning.plan_options import DEFAULTS, PlanOptions, engine_options, is_onnx
from edge.planning.space import PlanSpace
from edge.planning.type_files import TypeFile, type_files
from edge.profiling.cluster import Cluster
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.search.explain import best
from quant.text import bytes_text

_CONCURRENCY, _PROMPT = 4, 128
_ANSWER = 64  # tokens that must fit after a prompt
_A_REQUEST = 16  # minimum tokens for each of several requests


def spaces(
    path: Path,
    cluster: Cluster,
    options: PlanOptions = DEFAULTS,
    *,
    types: Sequence[str] = (),
    divergence_on: Path | None = None,
    steps: Steps = SILENT,
) -> list[PlanSpace]:
    """Measure the devices of an open cluster, and return the plan spaces of a model: one, or one for each type.

    types: types to quantize the model to, or files in such types; empty: only the model itself.
    divergence_on: text to measure the divergence of each type on; None: not measured.
    Raises PlanError if the context is too small for the workload; the errors of reading, quantizing and measuring; and
    those of `type_files`.
    """
    if is_onnx(path):
        return [_onnx_space(path, cluster, options, steps)]
    _check_room(options)
    file = ModelFile.open(path)
    if not types:
        return [llm_space(file, cluster, options, steps)]
    engine = EngineOptions(threads=options.threads, memory=options.memory)
    files = type_files(file, types, divergence_on, engine, steps)
    return [llm_space(of_type.file, cluster, options, steps, of_type) for of_type in files]


def _check_room(options: PlanOptions) -> None:
    if options.context is None:
        return
    prompt, requests = options.prompt_tokens or _PROMPT, options.concurrency or _CONCURRENCY
    for need, what, smaller in (
        (prompt + _ANSWER, f"a prompt of {prompt} tokens and {_ANSWER} more", "--prompt-tokens"),
        (requests * _A_REQUEST, f"{requests} requests of {_A_REQUEST} tokens", "--concurrency"),
    ):
        if need > options.context:
            raise PlanError(
                f"a context of {options.context} tokens is too small: {what} need {need};"
                f" use a larger --context or a smaller {smaller}"
            )


def llm_space(
    file: ModelFile,
    cluster: Cluster,
    options: PlanOptions,
    steps: Steps = SILENT,
    type_file: TypeFile | None = None,
    *,
    phases: bool = True,
) -> LlmSpace:
    """Return the plan space of a language model.

    type_file: type of the weights, if several files are compared.
    phases: True: plans may have a separate prefill placement.
    """
    engine = replace(
        engine_options(options),
        context=options.context or min(file.shape.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT),
        sequences=options.concurrency or _CONCURRENCY,
    )
    prompt, depth = options.prompt_tokens or _PROMPT, options.depth or DEPTH
    work = work_of(file, engine, prompt=prompt, depth=depth, wire=options.wire)
    digest, known = measured_speeds(
        file, cluster.devices, cluster.fleet, cluster.notes, options, steps, transport=options.transport
    )
    draft = draft_of(options, file, cluster.devices, work, steps, insecure=cluster.insecure)
    if type_file is not None and type_file.note:
        known = replace(known, notes=(*known.notes, type_file.note))
    if draft is not None:
        known = replace(known, notes=(*known.notes, assumed_text(draft, options.acceptance)))
    space = partial(LlmSpace, file, digest, work, known, options, type_file, draft=draft, phases=phases)
    if options.projector is None:
        return space()
    places = encoder_places(
        options.encoder, EncoderFiles.open(file, options.projector), cluster.addresses,
        timed=options.encoder_timed,
        insecure=cluster.insecure, threads=options.threads, fresh=options.fresh, steps=steps,
    )  # fmt: skip
    return with_encoder(space, places)


def with_encoder(space: Callable[..., LlmSpace], places: Sequence[EncoderPlace]) -> LlmSpace:
    """Return the plan space with the encoder in the first place where model and encoder fit.

    space: function that creates the plan space. Raises PlanError if no place has room for both.
    """
    alone, refused = space(), list[str]()
    for place in places:
        both, name = space(encoder=place), place.name
        own = [speed.memory_bytes for speed in alone.known.speeds if device(speed.device) == place.device]
        if own and place.held_bytes > own[0]:
            refused.append(f"{name} has {bytes_text(own[0])}")
            continue
        try:
            best(both.planner(), "latency")
        except PlanError as error:
            refused.append(f"on {name}: {error}")
        else:
            return both
    best(alone.planner(), "latency")  # raises an error if the model does not fit even without an encoder
    raise PlanError(
        f"the model and the encoder of pictures, which takes {bytes_text(places[0].held_bytes)}, do not fit together"
        f" ({'; '.join(refused)}); use a smaller type or a smaller --context, add a device, or leave the projector out"
    )


def _onnx_space(path: Path, cluster: Cluster, options: PlanOptions, steps: Steps) -> PlanSpace:
    from edge.onnx.model import load_source  # optional dependency
    from edge.planning.onnx_space import OnnxSpace
    from edge.profiling.onnx_survey import onnx_speeds

    model = load_source(path, options.dims, options.inputs)
    with steps.step("Measuring devices", unit="steps") as show:
        known, cuts = onnx_speeds(
            model,
            cluster.devices,
            cluster.fleet,
            cluster.notes,
            threads=options.threads,
            transport=options.transport,
            fresh=options.fresh,
            on_step=show,
        )
    return OnnxSpace(model, known, cuts, options)
