"""`edge chat`: a conversation with a model in a terminal, or one answer for a script."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import selectors
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import distributed
from apps.engine_options import add_engine_arguments
from apps.errors import UsageError
from apps.options import (
    add,
    add_draft_arguments,
    apply_reproducible,
    check_draft_worker,
    given_options,
    model_path,
    option,
    refuse,
    seed,
    set_common,
)
from apps.show.answer import LoadedChat, PlainAnswer, answer, dropped_line, end_line
from apps.show.progress import ShownSteps
from apps.show.progress import say as say_as
from apps.show.table import print_json
from devices.echo import echo_off
from edge.text.thinking_format import AUTO, parse_think
from edge.units import natural, number, positive_int

if TYPE_CHECKING:
    from edge.api.config import EngineConfig
    from edge.llm.chat import Chat, WhenFull
    from edge.llm.generate import Response
    from edge.llm.sampler import SamplingParams
    from edge.parallel.step_times import Summary
    from edge.weights.memory import MemoryNeed
    from edge.weights.plan import PagePlan

HELP = "Chat with a model: the bundled one, a GGUF file, a known name, or REPO:FILE from the Hugging Face hub."

say = partial(say_as, command="chat")
SILENT_S = 3.0  # seconds without piped text after which a line reports that the command waits for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = "--prompt --json --url --system --file --resume --think --max-tokens --temperature"
    common += " --context --memory --workers"
    set_common(parser, common)
    add(parser, "model")
    words = "answer this prompt once and exit; text piped to standard input comes first. -: only the piped text"
    parser.add_argument("-p", "--prompt", metavar="TEXT", help=words)
    add(parser, "--json", help="with -p: print one JSON object")
    option(parser, "--url URL", "use a server, such as `edge serve`; MODEL is the name of the model there")
    option(parser, "--api-key KEY", "with --url: key for the server (default: EDGE_API_KEY)")
    option(parser, "--system TEXT", "system message")
    option(
        parser, "--file FILE", "put this text file before the question; repeatable", Path, action="append", default=[]
    )
    option(parser, "--resume NAME", "continue the conversation saved as NAME, or start it; save it after each answer")
    add(parser, "--prefix-cache", "--lora")
    distributed.add_media_arguments(parser)
    add(parser, "--attention-window")
    words = "put this picture or sound before the question; repeatable"
    option(parser, "--image FILE", words, Path, action="append")
    add_draft_arguments(parser, "auto")
    words = "limit of thinking before an answer: off, a number of tokens, or auto: as the model's template says"
    words += " (default: auto)"
    option(parser, "--think HOW", words, parse_think)
    option(parser, "--max-tokens N", "end the answer after N tokens", positive_int)
    option(parser, "--min-tokens N", "do not let the model end the answer before N tokens", natural)
    words = "continue after the model ends its answer, up to --max-tokens"
    option(parser, "--ignore-eos", words, action="store_const", const=True)
    option(parser, "--stop TEXT", "end the answer before this text; repeatable", action="append", default=[])
    option(parser, "--chat-template FILE", "Jinja template to use instead of the model's own")
    words = "when the context is full: shift drops the oldest tokens and continues (default, if the model can), forget"
    words += " drops the oldest exchanges and computes the rest again, stop ends the answer. An answer with -p stops"
    words += " unless shift is chosen"
    option(parser, "--when-full", words, choices=("shift", "forget", "stop"))
    words = "do not end an answer that repeats itself"
    option(parser, "--allow-repetition", words, action="store_const", const=True)
    sampling = parser.add_argument_group("sampling")
    option(sampling, "--temperature T", "randomness; 0 always picks the likeliest token (default: 0.7)", number)
    option(sampling, "--top-k K", "sample from the K likeliest tokens; 0: from all (default: 40)", natural)
    words = "sample from the likeliest tokens whose probabilities add up to P (default: 0.95)"
    option(sampling, "--top-p P", words, number)
    words = "drop tokens less likely than P times the likeliest (default: 0.05)"
    option(sampling, "--min-p P", words, number)
    words = "sample from the most typical tokens whose probabilities add up to P; 1: off (default: 1)"
    option(sampling, "--typical-p P", words, number)
    option(sampling, "--repeat-penalty R", "above 1: make repeated tokens less likely (default: 1)", number)
    words = "DRY: above 0, make tokens that extend a repetition less likely (default: 0, off)"
    option(sampling, "--dry-multiplier M", words, number)
    words = "DRY: factor of the penalty for each further repeated token (default: 1.75)"
    option(sampling, "--dry-base B", words, number)
    words = "DRY: longest repetition without penalty, in tokens (default: 2)"
    option(sampling, "--dry-allowed-length N", words, natural)
    words = "DRY: number of earlier tokens to search for repetitions (default: all; 0: off)"
    option(sampling, "--dry-penalty-last-n N", words, natural)
    words = "DRY: text that ends a repetition; repeatable, replaces the default of newline, colon, quote and *;"
    words += " none: no such text"
    option(sampling, "--dry-sequence-breaker TEXT", words, action="append", dest="dry_sequence_breakers")
    option(sampling, "--xtc-probability P", "XTC: how often likely tokens are removed, 0 to 1 (default: 0)", number)
    words = "XTC: probability from which a token counts as likely (default: 0.1)"
    option(sampling, "--xtc-threshold T", words, number)
    words = "seed of the random draws; also turns --prefix-cache off, so that answers repeat (default: random)"
    option(sampling, "--seed N", words, seed)
    option(sampling, "--grammar FILE", "GBNF grammar that the answer must follow")
    option(sampling, "--json-schema FILE", "JSON schema that the answer must follow")
    add(sampling, "--reproducible")
    add_engine_arguments(parser)
    distributed.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    prompt = _prompt(args.prompt)
    if prompt is None and not sys.stdout.isatty():
        raise UsageError("standard output is not a terminal; give a prompt with -p TEXT")
    if prompt is None and args.json:
        raise UsageError("--json needs a prompt: give -p TEXT, or pipe it to standard input")
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty; give -p TEXT, or pipe text to standard input")
    with echo_off():
        return _run(args, prompt)


def _run(args: argparse.Namespace, prompt: str | None) -> int:
    if args.dry_sequence_breakers == ["none"]:
        args.dry_sequence_breakers = []
    if args.url is not None:
        return _ask_server(args, prompt)
    if args.api_key is not None:
        raise UsageError("--api-key is for a server; name it with --url URL")
    apply_reproducible(args)
    if args.reproducible and args.seed is None:
        args.seed = 0
    if args.seed is not None and args.prefix_cache is None:
        args.prefix_cache = 0  # stored KV cache may differ in the last bit, but the same seed must give the same answer
    args.draft = args.draft or ("auto" if args.seed is None else "off")  # verified rows may differ in the last bit too
    check_draft_worker(args)
    devices = distributed.prepare(args)
    sampling = _sampling(args)
    if sampling.json_schema is not None and (bounds := _bounds_line(sampling.json_schema)):
        say(f"--json-schema: {bounds}")
    template = _read(args.chat_template) if args.chat_template else None
    path = model_path(args.model)
    config = distributed.engine_config(args, path, devices)
    if args.least_memory is not None:
        from edge.weights.elastic.share import SHARE
        from edge.weights.elastic.signals import follow_memory_signals

        follow_memory_signals(SHARE.ask)
    with _loaded(args, config, template, once=prompt is not None) as loaded:
        if prompt is None:
            from apps.show.terminal import talk

            return talk(loaded, sampling, max_tokens=args.max_tokens, stop=args.stop)
        return _answer_once(args, loaded, prompt, sampling)


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "seed",
    "allow_repetition", "min_tokens", "ignore_eos",
)  # fmt: skip
_OF_THIS_PROCESS = (
    "resume", "lora", "mmproj", "encoder", "draft", "draft_worker", "prefix_cache", "chat_template", "when_full",
    "attention_window", "grammar", "context", "threads", "affinity", "batch", "gpu_layers", "gpu_memory",
    "memory", "window", "workers", "plan", "shares", "parallel", "insecure", "reproducible",
)  # fmt: skip


def _ask_server(args: argparse.Namespace, prompt: str | None) -> int:
    from apps.show.remote import answer_once, media_part, talk
    from edge.net.chat_client import ServerChat

    refuse(args, _OF_THIS_PROCESS, "is about a model that is loaded here, but with --url the server loads it")
    options = given_options(args, (*_SAMPLING, "max_tokens"))
    if args.stop:
        options["stop"] = args.stop
    if args.think is not None:
        options["reasoning_budget"] = args.think
    if args.json_schema:
        try:
            schema = json.loads(_read(args.json_schema))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--json-schema {args.json_schema}: not valid JSON: {error}; correct the file") from None
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    try:
        key = args.api_key or os.environ.get("EDGE_API_KEY")
        chat = ServerChat(args.url, key=key, model=args.model, system=args.system)
    except ValueError as error:
        raise UsageError(f"--url: {error}") from None
    chat.attached = [media_part(file) for file in args.image or ()]
    document = "".join(f"{_read(name).strip()}\n\n" for name in args.file)
    if prompt is None:
        if document:
            raise UsageError("--file with --url needs -p TEXT")
        return talk(chat, options)
    return answer_once(chat, document + prompt, options, as_json=args.json)


def _prompt(prompt: str | None) -> str | None:
    """Return the prompt to answer once: text piped to standard input, then `prompt`. None for a conversation."""
    if prompt != "-" and (sys.stdin is None or sys.stdin.isatty()):
        return prompt
    question = "" if prompt in (None, "-") else str(prompt)
    piped = _piped(waits=bool(question)).decode(errors="replace")
    if not question or not piped.strip():
        return question or piped
    return f"{piped.rstrip()}\n\n{question}"


def _piped(waits: bool) -> bytes:
    """Return all of standard input. waits: print a line if nothing arrives, because `prompt` alone may be meant."""
    if sys.stdin is None:
        return b""
    if waits:
        with selectors.PollSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            if not selector.select(SILENT_S):
                words = "waiting for text on standard input, to put it before the question"
                say(f"{words}; if there is none, add < /dev/null")
    return sys.stdin.buffer.read()


def _answer_once(args: argparse.Namespace, loaded: LoadedChat, prompt: str, sampling: SamplingParams) -> int:
    from edge.errors import EdgeError
    from edge.llama.interrupt import interrupt_stops
    from edge.llm.info import memory_json, memory_news

    chat = loaded.chat
    if loaded.deployed and not args.json:
        for line in (loaded.deployed.line(), *(f"link: {line}" for line in loaded.deployed.link_lines())):
            say(line)
    responses: list[Response] = []
    shown = PlainAnswer()
    with interrupt_stops(chat.engine):
        for response in answer(chat, prompt, sampling, max_tokens=args.max_tokens, stop=args.stop):
            responses.append(response)
            if not args.json:
                shown.write(response.text, response.thought)
    last = responses[-1]
    if loaded.resumed is not None:
        chat.save(loaded.resumed)
    if not args.json:
        sys.stdout.write("\n")
        if last.usage.dropped_tokens:
            say(dropped_line(last.usage))
        for line in memory_news(chat.engine):
            say(line)
        if ending := end_line(last, args.max_tokens, sampling):
            say(ending)
        return 0
    times: Sequence[Mapping[str, Summary]] = []
    lost: Exception | None = None
    if loaded.deployed:
        try:
            times = loaded.deployed.times()
        except EdgeError as error:  # the complete answer is printed without the step times
            lost, times = error, [{} for _ in loaded.deployed.names]
    result = {
        "text": "".join(r.text for r in responses),
        "thought": "".join(r.thought for r in responses),
        "token_ids": [r.token_id for r in responses if r.token_id is not None],
        "finish_reason": last.finish_reason,
        "repetition": dataclasses.asdict(last.repetition) if last.repetition else None,
        "usage": dataclasses.asdict(last.usage),
        "timing": {"load_s": loaded.seconds, **dataclasses.asdict(last.timing)},
        "speculation": chat.drafter.to_json() if chat.drafter else None,
        "seed": sampling.seed,
        **memory_json(chat.engine),
        **(loaded.deployed.to_json(times) if loaded.deployed else {}),
    }
    print_json(result, escaped=False)
    if lost is not None:
        raise lost
    return 0


@contextmanager
def _loaded(
    args: argparse.Namespace, config: EngineConfig, template: str | None, *, once: bool
) -> Iterator[LoadedChat]:
    """Yield a chat on the loaded model. once: for a single question, whose answer ends when the context is full."""
    document = "\n\n".join(_read(name).strip() for name in args.file)
    from edge.api.config import media_encoder
    from edge.llm.chat import Chat
    from edge.speculate.factory import speculation
    from edge.text.templates.process import TemplateProcess

    began = time.perf_counter()
    renderer = TemplateProcess()  # started now, so that it starts while the model is loaded
    with config.loaded(ShownSteps(), _say_memory) as (engine, deployed, draft), ExitStack() as stack:
        if deployed and engine.paging is not None:
            _say_memory(engine.memory, engine.paging.plan)
        if not deployed and engine.paging is None and not engine.memory.fits:
            say(
                f"{args.model or engine.path.name} is larger than the free memory and will be read from disk again and"
                " again, which is slow; --memory SIZE makes it faster"
            )
        if args.context is not None and 0 < (trained := engine.shape.context_length) < args.context:
            words = f"the model was trained for {trained} tokens; with longer contexts answers get worse"
            say(f"--context {args.context}: {words}")
        drafter = speculation(draft, engine, stack.enter_context, ShownSteps())
        when_full: WhenFull | None = args.when_full or ("forget" if once and not args.attention_window else None)
        chat = Chat(
            engine,
            template=template,
            renderer=renderer,
            when_full=when_full,
            drafter=drafter,
            think=AUTO if args.think is None else args.think,
            encoder=stack.enter_context(media_encoder(config, engine, ShownSteps())),
        )
        for file in args.image or ():
            chat.attach(file.read_bytes())
        resumed = _resumed(chat, args.resume) if args.resume is not None else None
        chat.system = args.system or chat.system
        chat.document = document or chat.document
        yield LoadedChat(chat, time.perf_counter() - began, deployed, resumed, args.model)


def _resumed(chat: Chat, name: str) -> Path:
    """Load the conversation saved under this name into `chat`, if it exists, and return its file."""
    from edge.llm.chat import conversation_path

    path = conversation_path(name)
    if path.exists():
        chat.load(path)
    said = f"{len(chat.messages)} messages" if path.exists() else "a new one"
    say(f"conversation {name}: {said}")
    return path


def _say_memory(need: MemoryNeed, plan: PagePlan) -> None:
    """Print how this device's memory limit is used."""
    say(f"memory: {plan.describe(need)}")


def _sampling(args: argparse.Namespace) -> SamplingParams:
    from edge.llm.sampler import SamplingParams

    files: dict[str, Any] = {n: _read(path) for n, path in given_options(args, ("grammar", "json_schema")).items()}
    return SamplingParams(**given_options(args, _SAMPLING), **files)


def _bounds_line(schema: str) -> str | None:
    """Return a line that lists arrays without a maximum length in a schema, or None if there are none."""
    from edge.text.json_arrays import bounded, bounds_line

    try:
        _, places = bounded(json.loads(schema))
    except (ValueError, RecursionError):
        return None  # the compiler of the schema reports the mistake
    return bounds_line(places) if places else None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file in UTF-8: {error}; convert it to UTF-8") from error
