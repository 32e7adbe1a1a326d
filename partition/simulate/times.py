"""Times of steps at the stages and links of a plan, from its prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.drafts import Draft
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve
from partition.simulate.servers import SimulatedStep

PROMPT_ROWS = 64  # of a step that answers wait for; edge.llm.step_budget begins with as many


@dataclass(frozen=True)
class StageOrLink:
    """A stage of a plan, or a link between two devices."""

    devices: tuple[str, ...]  # of a link: the first one of both ends
    seconds: Callable[[SimulatedStep], float]  # how long a step keeps it busy
    latency_s: float = 0.0  # of a link
    is_link: bool = False


def parts(predicted: Prediction, owner: str = LOCAL) -> list[StageOrLink]:
    """Every stage and link in the order that steps take them. owner: the device that sends and gets the answers.

        a step of r rows        rows_s(r), and busy_s where r is the microbatch that it was predicted for
        r rows of a prompt p    rows_s(p) r / p, at every stage
        n rows beside r others  rows_s(r + n) - rows_s(r), as a step reads weights once, or what they take by themselves
                                without what a step takes beside its rows, if that is more
                                all times its crowding, where stages share a machine
        drafts                  guess_s each, and ask_s for all of a step, before the first stage computes
        a link                  rows x busy, and its latency on top: busy is of one row, from transfer_busy_s, which is
                                of a microbatch; latency = transfer_s - busy

    PlanError for a device that has two stages, which would share it in a way that no formula knows.
    """
    if predicted.prefill is not None:
        raise PlanError("prompts have a placement of their own; only plans with one placement can be simulated")
    stages = predicted.stages
    names = [device for stage in stages for device in stage.devices]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise PlanError(f"{twice} appears twice in the plan; only plans that use each device once can be simulated")
    rows = predicted.in_flight / predicted.microbatches
    result: list[StageOrLink] = []
    if predicted.enter_s:
        enter = partial(_sends, predicted.enter_busy_s)
        latency_s = max(0.0, predicted.enter_s - predicted.enter_busy_s)
        result.append(StageOrLink((owner, stages[0].devices[0]), enter, latency_s, is_link=True))
    for i, stage in enumerate(stages):
        curve = stage.rows_s
        decode = curve
        if rows == round(rows):  # such a step takes what was predicted of it
            decode = Curve(tuple(sorted({**dict(curve.points), round(rows): stage.busy_s}.items())))
        draft = predicted.draft if i == 0 else None
        computes = partial(_computes, cache(curve.at), cache(decode.at), stage.crowding, draft)
        result.append(StageOrLink(stage.devices, computes))
        last = i + 1 == len(stages)
        # The formulas round hidden states to whole rows, and not the logits that go back.
        a_row = stage.transfer_busy_s / (rows if last else max(1, round(rows)))
        goes_to = owner if last else stages[i + 1].devices[0]
        latency_s = max(0.0, stage.transfer_s - a_row)
        sends = partial(_answers if last else _sends, a_row)
        result.append(StageOrLink((stage.devices[0], goes_to), sends, latency_s, is_link=True))
    return result


def capacity_per_s(predicted: Prediction, prompt: int, tokens: int) -> float:
    """Requests a second that the plan can do at most, of so many tokens each (1 of an ONNX model: inputs).

    1 / max over parts (prompt + (tokens - 1) / b decode steps of b rows, less what rows beside prompts save), or
    C / (the prompt alone + (tokens - 1) passes of b rows), whichever is less, of C requests in groups of b; with
    drafts, which only one request alone has, 1 / (the prompt alone + (tokens - 1) x its latency)
    """
    rows = max(1, -(-predicted.in_flight // predicted.microbatches))
    stages = parts(predicted)
    group = SimulatedStep(tuple(range(rows)), rows)
    chunk, others, n_chunks = SimulatedStep((0,), 1), SimulatedStep((), 1), 1
    if predicted.prompt is not None:
        n_rows = chunk_rows(prompt, predicted.n_stages)
        n_chunks = round(prompt / n_rows)
        chunk, others = SimulatedStep((0,), 0, ((prompt, n_rows),)), SimulatedStep((), 0, ((prompt, n_rows),))
    busy, alone, prompt_s = [], 0.0, 0.0
    for part in stages:
        first = part.seconds(chunk) + (n_chunks - 1) * part.seconds(others)
        group_s = part.seconds(group)
        answer_s = (tokens - 1) / rows * group_s
        if rows > 1 and others.prompts:  # answers of others have rows in the steps of the prompt
            some = SimulatedStep((), 0, ((prompt, min(prompt, PROMPT_ROWS)),))
            beside_s = (part.seconds(replace(some, decodes=rows - 1)) - part.seconds(some)) / (rows - 1)
            n_beside = min(tokens - 1, -(-prompt // PROMPT_ROWS) * (rows - 1))
            answer_s -= n_beside * max(0.0, group_s / rows - beside_s)
        busy.append(first + answer_s)
        prompt_s += part.seconds(chunk) + part.latency_s
        alone += (tokens - 1) * (group_s + part.latency_s)
    prompt_s += (n_chunks - 1) * max(part.seconds(others) for part in stages)
    if predicted.draft is not None and predicted.in_flight == 1:
        return 1 / max(prompt_s + (tokens - 1) * predicted.latency_s, 1e-12)
    alone += prompt_s
    return min(1 / max(*busy, 1e-12), predicted.in_flight / max(alone, 1e-12))


def chunk_rows(prompt: int, stages: int) -> float:
    """Rows of each chunk of a prompt, while there are no answers beside it: even ones, as many as
    `partition.predict.cost` has. stages: that compute."""
    from partition.predict.cost import chunks  # loads numpy

    return prompt / chunks(prompt, stages)


def _computes(
    prompt_s: Callable[[float], float],
    decode_s: Callable[[float], float],
    crowding: float,
    draft: Draft | None,
    step: SimulatedStep,
) -> float:
    seconds, before = 0.0, 0.0
    alone = [(prompt_s(prompt) * rows / prompt, rows) for prompt, rows in step.prompts]
    step_s = 2 * prompt_s(1) - prompt_s(2)  # without rows
    for alone_s, rows in (*alone, (decode_s(step.decodes) if step.decodes else 0.0, step.decodes)):
        if before and rows:  # rows of a prompt have no logits but the last, so its curve may show too little
            alone_s = min(alone_s, max(0.0, alone_s - step_s, prompt_s(before + rows) - prompt_s(before)))
        seconds, before = seconds + alone_s, before + rows
    drafts_s = 0.0 if draft is None else draft.waiting_s(step.drafts + step.follows)
    return crowding * seconds + drafts_s


def _sends(a_row: float, step: SimulatedStep) -> float:
    return a_row * step.rows


def _answers(a_row: float, step: SimulatedStep) -> float:
    """A prompt is answered by one row of logits, at its end."""
    return a_row * (len(step.requests) + step.drafts)
