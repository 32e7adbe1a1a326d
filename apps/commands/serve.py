"""`edge serve`: models behind the APIs of OpenAI, Anthropic and Ollama, and a page to talk to them."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from apps import distributed
from apps.engine_options import add_engine_arguments
from apps.errors import UsageError
from apps.options import (
    add,
    add_draft_arguments,
    apply_reproducible,
    check_draft_worker,
    check_installed,
    given_options,
    model_path,
    option,
    refuse,
)
from apps.presets import Preset, read_presets
from apps.show.progress import say as say_as
from edge import units
from edge.errors import EdgeError
from edge.thinking.format import parse_think
from partition.predict.drafts import KINDS, SELF

if TYPE_CHECKING:
    from edge.api.config import EngineConfig
    from edge.models.wheels import Progress

HELP = "Serve models by the APIs of OpenAI, Anthropic and Ollama, with a page to talk to them."

PORT, REQUESTS, QUEUE = 8080, 8, 256
MAX_REQUESTS, MAX_QUEUE = 255, 1 << 16
MOST_TARGET_MS = 600_000
MOST_IDLE_MINUTES = 525_600
WARMING_S = 360.0  # of an hour
TARGETS = ("target_itl", "target_ttft")
KEY_VARIABLE, ADMIN_VARIABLE = "EDGE_API_KEY", "EDGE_ADMIN_KEY"
DRAFTS = (*KINDS, SELF)
say = partial(say_as, command="serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="GGUF files, folders of them, names, REPO:FILE (default: the bundled model and all that were fetched)",
    )
    group = parser.add_argument_group("server")
    option(group, "--config FILE", "presets: models with names, options and system prompts, in place of MODEL", Path)
    words = "after which a model that nobody uses is unloaded (default: it stays until another needs its memory)"
    option(group, "--idle-unload MINUTES", words, units.between(0, MOST_IDLE_MINUTES))
    option(group, "--allow-pull", "let requests fetch models, by Ollama's API")
    option(group, "--host ADDRESS", "to listen on (default: this device only)", default="127.0.0.1")
    option(group, "--port N", f"0: any free one (default: {PORT})", units.whole(0, 65535), default=PORT)
    words = f"that requests need, repeatable; {KEY_VARIABLE} in the environment is one, which others cannot see"
    option(group, "--api-key KEY", words, action="append", default=[])
    option(group, "--api-key-file FILE", "that has keys, one in each line", Path)
    words = f"that may change what concerns all keys, repeatable; also {ADMIN_VARIABLE} (default: an only key may)"
    option(group, "--admin-key KEY", words, action="append", default=[])
    option(group, "--admin-key-file FILE", "that has keys of administrators, one in each line", Path)
    words = "let who has one key notice, by the speed of an answer, what was asked with another (default: it cannot)"
    option(group, "--shared-prefixes", words)
    words = "scripts of pages from there may ask, such as https://example.org; repeatable"
    option(group, "--allow-origin URL", words, action="append", default=[])
    option(group, "--allow-host NAME", "the server is called so, too; repeatable", action="append", default=[])
    option(group, "--tls-cert FILE", "certificate of the server, PEM: clients are answered by TLS, https://", Path)
    option(group, "--tls-key FILE", "the certificate's key, PEM, not encrypted", Path)
    words = f"that are answered at once by each model (default: {REQUESTS}; with --reproducible 1)"
    option(group, "--requests N", words, units.whole(1, MAX_REQUESTS))
    target = units.between(1, MOST_TARGET_MS)
    words = "between two tokens of an answer, milliseconds: prompts beside it come in parts that keep to that"
    option(group, "--target-itl MS", words, target)
    words = "to first tokens, milliseconds; without --target-itl, gaps of other answers are as short as that allows"
    option(group, "--target-ttft MS", words, target)
    words = f"that may wait beside them; more are refused, and asked to come later (default: {QUEUE})"
    option(group, "--queue N", words, units.whole(0, MAX_QUEUE), default=QUEUE)
    add(group, "--prefix-cache", "--lora")
    distributed.add_media_arguments(group)
    add(group, "--attention-window")
    words = "fetch pictures and sounds by URLs in requests: from the internet, or all that is reached (default: not)"
    option(group, "--media-urls", words, choices=("public", "all"))
    add_draft_arguments(group, "auto")
    words = "while nobody asks, compute what prompts will begin with: on, off, or N seconds of an hour (default: off)"
    option(group, "--prefix-warming HOW", words, _warming_seconds)
    words = "tokens that models think before an answer, where a request does not say: off, auto or N (default: auto)"
    option(group, "--think HOW", words, parse_think)
    words = "models that fill gaps want the text behind a gap first (suffix, prefix, middle)"
    option(group, "--spm-infill", words)
    add(group, "--reproducible")
    option(group, "--front FILE", "front to choose plans from on the page, as `edge pareto --json` prints it", Path)
    distributed.add_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_installed({"starlette": "starlette", "uvicorn": "uvicorn", "pydantic": "pydantic"}, "serving", "serve")
    if args.save_plan is not None:
        raise UsageError("--save-plan is of commands that end; make a plan with `edge plan`, and serve it with --plan")
    insecure = args.insecure
    asks_workers = args.workers is not None or args.plan is not None or distributed.has_helper(args)
    args.insecure = insecure and asks_workers  # else it is about clients alone
    apply_reproducible(args)
    if args.reproducible and (args.requests or 1) > 1:
        raise UsageError(
            f"--requests {args.requests}: what a request gets depends on those that share its steps, so"
            " --reproducible answers one at a time; leave one of them out"
        )
    if args.reproducible and args.prefix_warming:
        raise UsageError("--prefix-warming: with --reproducible no prompt uses what was computed before; leave one out")
    args.requests = args.requests or (1 if args.reproducible else REQUESTS)
    if args.requests == 1:
        refuse(args, TARGETS, "is about prompts beside answers, and one request is answered at a time; leave it out")
    targets = {f"{name}_ms": value for name, value in given_options(args, TARGETS).items()}
    check_draft_worker(args)
    devices = distributed.prepare(args)
    if args.front is not None:
        _check_front(args.front)

    def engine_config(path: Path, args: argparse.Namespace = args, system: str = "") -> EngineConfig:
        if args.draft and args.draft not in DRAFTS:
            args.draft = str(model_path(args.draft).absolute())  # the engine process makes what has to be made
        config = distributed.engine_config(args, path, devices, args.requests, draft=DRAFTS[0])
        return replace(
            config,
            spm_infill=args.spm_infill,
            media_urls=args.media_urls or "",
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
    if not presets:
        models = _models(args.models, devices is None)
        if len(models) > 1:
            refuse(args, ("lora", "mmproj", "encoder"), f"is of one model, and there are {len(models)}; name one")
        for name, path in models.items():
            try:
                configs[name] = engine_config(path)
            except (EdgeError, OSError) as error:  # such as a damaged projector beside it
                if len(models) == 1:
                    raise
                say(f"{path} is left out: {error}")
        if not configs:
            raise UsageError("none of these models can be served, as the lines before say")
    if devices is not None:
        refuse(
            args, ("allow_pull",), "adds models to those of this device, and several devices serve one; leave it out"
        )
    if devices is not None and len(configs) > 1:
        raise UsageError(f"several devices serve one model, {len(configs)} were given")

    from devices.files import is_usable
    from devices.paths import cache_folder, state_folder
    from devices.streams import output_as_log
    from edge import log
    from edge.ending import signals_are_for_the_program
    from edge.models.paths import pull
    from edge.serve.options import ServeOptions
    from edge.serve.server import serve

    keys = _keys(args.api_key, KEY_VARIABLE, args.api_key_file, "--api-key-file")
    admin_keys = _keys(args.admin_key, ADMIN_VARIABLE, args.admin_key_file, "--admin-key-file")
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
        shared_prefixes=args.shared_prefixes,
        front=args.front,
        memory=args.memory if devices is None else None,
        idle_unload_s=math.inf if args.idle_unload is None else args.idle_unload * 60,
        pinned=tuple(name for name, preset in presets.items() if preset.pinned),
    )

    def fetch(name: str, progress: Progress) -> EngineConfig:
        return engine_config(pull(name, progress))

    output_as_log()
    log.set_up(events=False)
    for folder in (state_folder(), cache_folder()):  # the engine processes say nothing of it
        is_usable(folder)
    say_where = partial(print, "listening on", flush=True)
    with signals_are_for_the_program():
        serve(
            configs, options, queue=args.queue, say=say, listening=say_where, fetch=fetch if args.allow_pull else None
        )
    return 0


def _presets(args: argparse.Namespace) -> dict[str, Preset]:
    """The models of --config, by name. OSError, UsageError."""
    if args.models:
        raise UsageError(f"--config {args.config} names the models; leave {args.models[0]} out, or write it there")
    refuse(args, ("lora", "mmproj", "encoder"), "is of one model; write it below its [[model]] in the file of --config")
    return read_presets(args.config, args, add_arguments)


def _warming_seconds(text: str) -> float:
    """The seconds of an hour that --prefix-warming says. ValueError."""
    known = {"off": 0.0, "on": WARMING_S}
    try:
        return known[text] if text in known else units.between(1, 3600)(text)
    except ValueError:
        raise ValueError(f"needs on, off, or seconds from 1 to 3600, got {text!r}") from None


def _keys(options: list[str], variable: str, path: Path | None, option: str) -> tuple[str, ...]:
    """The keys of options, of the environment, and in the lines of a file. OSError, UsageError for a file without any,
    or of no text."""
    several = (*options, *filter(None, [os.environ.get(variable)]))
    if path is None:
        return several
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        keys = []
    if not keys:
        raise UsageError(f"{option} {path} has no keys; write one in each line")
    return (*several, *keys)


def _check_front(path: Path) -> None:
    """OSError, or UsageError for what is no front."""
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
    except (ValueError, RecursionError, KeyError, TypeError):
        points = None
    if not isinstance(points, list):
        raise UsageError(f"--front {path} is no front; make one with `edge pareto --json > {path}`")


def _models(specs: list[str], several: bool) -> dict[str, Path]:
    """Return the files to serve, by name; without specs the bundled model and, where several may be served, all that
    were fetched. UsageError for two of a name; ModelFileError for a folder without any."""
    from edge.models.file_kinds import model_name

    if not specs:
        from edge.models.paths import fetched_models

        bundled = model_path(None)
        return {bundled.stem: bundled, **(fetched_models() if several else {})}
    files: dict[str, Path] = {}
    for spec in specs:
        is_folder = Path(spec).is_dir()
        for path in _models_in(Path(spec)) if is_folder else [model_path(spec)]:
            if (name := model_name(path)) not in files:
                files[name] = path
            elif is_folder:
                say(f"{path} is left out: another model is called {name}, too; rename one")
            else:
                raise UsageError(f"two models are called {name}; rename one, or leave it out")
    return files


def _models_in(folder: Path) -> list[Path]:
    from edge.models.folder import models_in

    return models_in(folder, say)
