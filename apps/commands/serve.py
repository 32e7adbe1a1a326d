"""`edge serve`: serves models by the APIs of OpenAI, Anthropic and Ollama, networks in ONNX, and a chat page."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import distributed
from apps.engine_options import add_engine_arguments
from apps.errors import UsageError
from apps.options import (
    AUTO,
    add,
    add_draft_arguments,
    apply_reproducible,
    check_dimensions,
    check_draft_worker,
    check_installed,
    check_onnx,
    given_options,
    is_onnx,
    model_path,
    option,
    refuse,
    set_common,
)
from apps.presets import Preset, read_presets
from apps.show.progress import say as say_as
from edge import units
from edge.errors import EdgeError
from edge.text.thinking_format import parse_think
from partition.predict.drafts import KINDS, SELF

if TYPE_CHECKING:
    from apps.distributed import Devices
    from edge.api.config import EngineConfig
    from edge.models.wheels import Progress
    from edge.serve.oip.config import NetworkConfig
    from partition.plan.plan import Plan

HELP = "Serve models by the APIs of OpenAI, Anthropic and Ollama, with a chat page for the browser."

PORT, REQUESTS, QUEUE = 8080, 8, 256
MAX_REQUESTS, MAX_QUEUE = 255, 1 << 16
MOST_TARGET_MS = 600_000
MOST_IDLE_MINUTES = 525_600
DRAIN_S, MOST_DRAIN_S = 30, 86_400  # the default equals that of edge.serve.options
WARMING_S = 360.0  # seconds of each hour
TARGETS = ("target_itl", "target_ttft")
OF_ONE_MODEL = ("lora", "mmproj", "encoder")
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0  # of a key
KEY_VARIABLE, ADMIN_VARIABLE = "EDGE_API_KEY", "EDGE_ADMIN_KEY"
DRAFTS = (*KINDS, SELF)
say = partial(say_as, command="serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = "--host --port --api-key --config --requests --draft --context --threads --memory --kv-type"
    common += " --workers --tls-cert --tls-key"
    set_common(parser, common)
    words = "GGUF or ONNX files, folders, known names, or REPO:FILE (default: the bundled and all downloaded models)"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=words)
    group = parser.add_argument_group("server")
    words = "file with models, their names, options and system prompts, instead of MODEL"
    option(group, "--config FILE", words, Path)
    words = "unload a model after this time without requests (default: only when another model needs its memory)"
    option(group, "--idle-unload MINUTES", words, units.between(0, MOST_IDLE_MINUTES))
    words = f"seconds for running answers to end after SIGTERM (default: {DRAIN_S})"
    option(group, "--drain SECONDS", words, units.between(0, MOST_DRAIN_S), default=DRAIN_S)
    words = "what the plan for --workers is best in: throughput, with a latency at most 1.1 times the best, or latency"
    option(
        group, "--objective", f"{words} (default: throughput)", choices=("throughput", "latency"), default="throughput"
    )
    words = "let requests download models even if the server is open to others without keys; unknown names then stand"
    option(group, "--allow-pull", f"{words} for no model (default: administrators may download models)")
    option(group, "--host ADDRESS", "address to listen on (default: this device only)", default="127.0.0.1")
    words = f"port to listen on; 0: any free port (default: {PORT})"
    option(group, "--port N", words, units.whole(0, 65535), default=PORT)
    words = "accept only requests with this key; repeatable. Other users of this machine can read a command line, but"
    words += f" not a key in the environment variable {KEY_VARIABLE}"
    option(group, "--api-key KEY", words, action="append", default=[])
    option(group, "--api-key-file FILE", "read keys from this file, one in each line", Path)
    words = (
        f"key that may also change settings for all keys; repeatable, also {ADMIN_VARIABLE} (default: the API key, if"
    )
    words += " there is only one)"
    option(group, "--admin-key KEY", words, action="append", default=[])
    option(group, "--admin-key-file FILE", "read administrator keys from this file, one in each line", Path)
    words = (
        "share the prefix cache between keys; the speed of an answer can then reveal prompts of other keys (default:"
    )
    words += " one cache for each key)"
    option(group, "--shared-prefixes", words)
    words = "allow scripts of web pages from this origin, such as https://example.org; repeatable"
    option(group, "--allow-origin URL", words, action="append", default=[])
    words = "accept requests that address the server by this host name; repeatable"
    option(group, "--allow-host NAME", words, action="append", default=[])
    option(group, "--tls-cert FILE", "certificate of the server (PEM); turns on https://", Path)
    option(group, "--tls-key FILE", "private key of the certificate (PEM, not encrypted)", Path)
    words = f"maximum number of requests answered concurrently per model (default: {REQUESTS}; 1 with --reproducible)"
    option(group, "--requests N", words, units.whole(1, MAX_REQUESTS))
    target = units.between(1, MOST_TARGET_MS)
    words = "target for the time between two tokens of an answer (ms); prompts are split into chunks to meet it"
    option(group, "--target-itl MS", words, target)
    words = "target for the time to the first token (ms); without --target-itl, chunks are as small as this allows"
    option(group, "--target-ttft MS", words, target)
    words = f"maximum number of waiting requests; more are refused with a request to retry later (default: {QUEUE})"
    option(group, "--queue N", words, units.whole(0, MAX_QUEUE), default=QUEUE)
    add(group, "--prefix-cache", "--lora")
    distributed.add_media_arguments(group)
    add(group, "--attention-window")
    words = "download pictures and sounds from URLs in requests: public, from the internet only; all, also from private"
    words += " networks (default: refuse URLs)"
    option(group, "--media-urls", words, choices=("public", "all"))
    add_draft_arguments(group, "auto")
    words = "compute likely prompt prefixes while the server is idle: on, off, or N seconds of each hour (default: off)"
    option(group, "--prefix-warming HOW", words, _warming_seconds)
    words = "limit of thinking for requests without one: off, a number of tokens, or auto: as the model's template says"
    words += " (default: auto)"
    option(group, "--think HOW", words, parse_think)
    words = "for fill-in-the-middle requests, put the suffix first (suffix, prefix, middle), as some models need"
    option(group, "--spm-infill", words)
    add(group, "--reproducible")
    add(group, "--dim", default=[])
    words = "also serve networks in ONNX over gRPC, by the Open Inference Protocol (default: only over HTTP)"
    option(group, "--grpc HOST:PORT", words)
    words = "JSON file of `edge pareto --json`, from which the page lets users choose a plan"
    option(group, "--front FILE", words, Path)
    distributed.add_arguments(parser, serves=True)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_installed({"starlette": "starlette", "uvicorn": "uvicorn", "pydantic": "pydantic"}, "serving", "serve")
    if args.save_plan is not None:
        raise UsageError("--save-plan is not for a server; make a plan with `edge plan`, and serve it with --plan")
    insecure = args.insecure
    asks_workers = args.workers is not None or args.plan is not None or distributed.has_helper(args)
    args.insecure = insecure and asks_workers  # without workers, --insecure applies to clients only
    apply_reproducible(args)
    if args.reproducible and (args.requests or 1) > 1:
        raise UsageError(
            f"--requests {args.requests}: --reproducible answers one request at a time, because requests in the same"
            " step change each other's results; leave one of them out"
        )
    if args.reproducible and args.prefix_warming:
        raise UsageError("--prefix-warming: with --reproducible no prompt uses a stored prefix; leave one of them out")
    args.requests = args.requests or (1 if args.reproducible else REQUESTS)
    if args.requests == 1:
        refuse(
            args, TARGETS, "is about prompts next to other answers, but only one request runs at a time; leave it out"
        )
    targets = {f"{name}_ms": value for name, value in given_options(args, TARGETS).items()}
    check_draft_worker(args)
    onnx_files = [Path(name) for name in args.models if is_onnx(name)]
    args.models = [name for name in args.models if not is_onnx(name)]
    networks = _networks(args, onnx_files) if onnx_files else {}
    over_devices = networks and (args.workers is not None or args.plan is not None)  # then a network is the only model
    devices = None if over_devices else distributed.prepare(args)
    if args.grpc is not None and not networks:
        raise UsageError(f"--grpc {args.grpc} is for networks in ONNX; name one")
    if args.front is not None:
        _check_front(args.front)

    def engine_config(
        path: Path, args: argparse.Namespace = args, system: str = "", devices: Devices[Plan] | None = devices
    ) -> EngineConfig:
        if args.draft and args.draft not in DRAFTS:
            args.draft = str(model_path(args.draft).absolute())  # the engine process creates files that are missing
        config = distributed.engine_config(args, path, devices, args.requests, draft=DRAFTS[0])
        return replace(
            config,
            spm_infill=args.spm_infill,
            media_urls=args.media_urls or "",
            objective=args.objective,
            system=system,
            prefix_warming=args.prefix_warming or 0.0,
            **targets,
        )

    presets = {} if args.config is None else _presets(args)
    configs = {}
    for name, preset in presets.items():
        try:
            apply_reproducible(preset.args)
            preset.args.insecure |= insecure and distributed.has_helper(preset.args)
            configs[name] = engine_config(preset.path, preset.args, preset.system)
        except UsageError as error:
            raise UsageError(f"{args.config}: the model {name!r}: {error}") from None
    if not presets and (args.models or not networks):
        models = _models(args.models, devices is None)
        if len(models) > 1:
            refuse(args, OF_ONE_MODEL, f"is of one model, and there are {len(models)}; name one")
        for name, path in models.items():
            try:
                configs[name] = engine_config(path)
            except (EdgeError, OSError) as error:  # for example a damaged projector next to the model
                if len(models) == 1:
                    raise
                say(f"{path} is left out: {error}")
        if not configs and not networks:
            raise UsageError("none of these models can be served, for the reasons above")
    if devices is not None and len(configs) > 1:
        raise UsageError(f"several devices can serve one model only, got {len(configs)}; name one")

    from devices.files import is_usable
    from devices.paths import cache_folder, state_folder
    from devices.streams import output_as_log
    from edge import log
    from edge.ending import signals_are_for_the_program
    from edge.models.paths import pull
    from edge.net.channel import is_loopback
    from edge.serve.options import ServeOptions
    from edge.serve.server import serve

    weights: dict[str, float] = {}
    keys = _keys(args.api_key, KEY_VARIABLE, args.api_key_file, "--api-key-file", weights)
    admin_keys = _keys(args.admin_key, ADMIN_VARIABLE, args.admin_key_file, "--admin-key-file", weights)
    options = ServeOptions(
        args.host,
        args.port,
        keys,
        insecure,
        tuple(args.allow_origin),
        tuple(args.allow_host),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        admin_keys=admin_keys,
        weights=weights,
        shared_prefixes=args.shared_prefixes,
        front=args.front,
        grpc=None if args.grpc is None else _grpc_address(args.grpc),
        memory=args.memory if devices is None else None,
        drain_s=args.drain,
        idle_unload_s=math.inf if args.idle_unload is None else args.idle_unload * 60,
        pinned=tuple(name for name, preset in presets.items() if preset.pinned),
    )

    own_args = argparse.Namespace(**{**vars(args), **dict.fromkeys((*OF_ONE_MODEL, "save_plan"))})

    def fetch(name: str, progress: Progress) -> EngineConfig:
        return engine_config(pull(name, progress), own_args, devices=None)

    output_as_log()
    log.set_up(events=False)
    for folder in (state_folder(), cache_folder()):  # check them here: engine processes do not report it
        is_usable(folder)
    say_where = partial(print, "listening on", flush=True)
    with signals_are_for_the_program():
        serve(
            configs,
            options,
            queue=args.queue,
            say=say,
            listening=say_where,
            fetch=fetch if args.allow_pull or options.keys or is_loopback(args.host) else None,
            any_name=not args.allow_pull,
            networks=networks,
        )
    return 0


def _networks(args: argparse.Namespace, files: list[Path]) -> dict[str, NetworkConfig]:
    """Return the configurations of ONNX networks, by the names of their files.

    Raises UsageError if two networks have the same name, or if several devices would serve several models.
    """
    check_onnx()
    check_dimensions(args.dim)
    from edge.serve.oip.config import NetworkConfig

    several: dict[str, Any] = {}
    if args.workers is not None or args.plan is not None:
        if len(files) > 1 or args.models or args.config is not None:
            raise UsageError("several devices can serve one model only; name one")
        if args.workers == AUTO:
            raise UsageError("--workers auto is for language models; name the workers of a network one by one")
        devices = distributed.prepare_onnx(args)
        if devices is not None and devices.workers:
            several = {"workers": devices.addresses, "insecure": args.insecure, "dims": dict(args.dim)}
            several |= given_options(args, ("shares", "transport", "wire"))
            several["replicas"] = args.parallel == distributed.REPLICAS
            if devices.plan is not None:
                several |= {"plan": devices.plan.to_json(), "plan_name": str(args.plan)}
    configs: dict[str, NetworkConfig] = {}
    for path in files:
        if path.stem in configs:
            raise UsageError(f"two networks are called {path.stem}; rename one, or leave it out")
        path.open("rb").close()
        configs[path.stem] = NetworkConfig(str(path.absolute()), args.threads, **several)
    return configs


def _grpc_address(text: str) -> tuple[str, int]:
    """Return (host, port) from HOST:PORT, or from a port of this device. Raises UsageError."""
    from edge.net.channel import parse_listen

    try:
        if not re.search(r"(^|[^:]:|]:)\d+$", text):
            raise ValueError(f"needs HOST:PORT, got {text[:80]!r}")
        return parse_listen(text, "127.0.0.1:0")
    except ValueError as error:
        raise UsageError(f"--grpc: {error}") from None


def _presets(args: argparse.Namespace) -> dict[str, Preset]:
    """Return the models of --config, by name. Raises OSError or UsageError if the file cannot be used."""
    if args.models:
        raise UsageError(f"--config {args.config} names the models; leave {args.models[0]} out, or add it to the file")
    refuse(args, OF_ONE_MODEL, "is of one model; write it below its [[model]] in the file of --config")
    return read_presets(args.config, args, add_arguments)


def _warming_seconds(text: str) -> float:
    """Return the seconds of each hour that --prefix-warming allows. Raises ValueError."""
    known = {"off": 0.0, "on": WARMING_S}
    try:
        return known[text] if text in known else units.between(1, 3600)(text)
    except ValueError:
        raise ValueError(f"needs on, off, or seconds from 1 to 3600, got {text!r}") from None


def _keys(
    options: list[str], variable: str, path: Path | None, option: str, weights: dict[str, float]
) -> tuple[str, ...]:
    """Return keys from options, from an environment variable, and from the lines of a file.

    weights: receives the weights of keys in the file.

    Raises OSError if the file cannot be read, and UsageError if it has no keys or is not text, or if a weight is not a
    number from 0.01 to 100.
    """
    several = (*options, *filter(None, [os.environ.get(variable)]))
    if path is None:
        return several
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        keys = []
    if not keys:
        raise UsageError(f"{option} {path} has no keys; write one in each line")
    for number, line in enumerate(keys):
        key, separator, weight = line.rpartition(" weight=")
        if separator:
            keys[number] = key.rstrip()
            try:
                weights[keys[number]] = float(weight)
            except ValueError:
                weights[keys[number]] = 0.0
            if not LEAST_WEIGHT <= weights[keys[number]] <= MOST_WEIGHT:
                raise UsageError(
                    f"{option} {path}: the weight of a key must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g},"
                    f" got {weight!r}; write a line such as KEY weight=2"
                )
    return (*several, *keys)


def _check_front(path: Path) -> None:
    """Raise OSError if a file cannot be read, and UsageError if it is not the JSON of a front."""
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
    except (ValueError, RecursionError, KeyError, TypeError):
        points = None
    if not isinstance(points, list):
        raise UsageError(f"--front {path} is not a front; make one with `edge pareto --json > {path}`")


def _models(specs: list[str], several: bool) -> dict[str, Path]:
    """Return the model files to serve, by model name: the known name or REPO:FILE in `specs`, or the name of a file.

    Without specs these are the bundled model and, if `several`, all downloaded models.

    Raises UsageError if two models have the same name, and ModelFileError if a folder has no model.
    """
    from edge.models.file_kinds import model_name

    if not specs:
        from edge.models.paths import fetched_models

        bundled = model_path(None)
        return {bundled.stem: bundled, **(fetched_models() if several else {})}
    files: dict[str, Path] = {}
    for spec in specs:
        is_folder = Path(spec).is_dir()
        for path in _models_in(Path(spec)) if is_folder else [model_path(spec)]:
            is_file = Path(spec).exists() or "://" in spec
            if (name := model_name(path) if is_file else spec) not in files:
                files[name] = path
            elif is_folder:
                say(f"{path} is left out: another model is called {name}, too; rename one")
            else:
                raise UsageError(f"two models are called {name}; rename one, or leave it out")
    return files


def _models_in(folder: Path) -> list[Path]:
    from edge.models.folder import models_in

    return models_in(folder, say)
