"""Times of a simulated step at each stage and link of a plan, derived from the plan's prediction."""

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

PROMPT_ROWS = 64  # prefill rows of a step with decode rows; initial value of edge.llm.step_budget


@dataclass(frozen=True)
class StageOrLink:
    """A stage of a plan, or a link between two devices."""

    devices: tuple[str, ...]  # devices of a stage; for a link, the first device of each end
    seconds: Callable[[SimulatedStep], float]  # how long a step occupies the stage or link
    latency_s: float = 0.0  # latency of a link; 0 for a stage
    is_link: bool = False


def parts(predicted: Prediction, owner: str = LOCAL) -> list[StageOrLink]:
    """Return the stages and links of a plan, in the order that steps take them.

    owner: the device that sends requests and receives results.

    Times:
        r decode rows: rows_s(r); busy_s if r is the predicted microbatch.
        r rows of a prompt of p tokens: rows_s(p) r / p, at every stage.
        n more rows in a step of r rows: rows_s(r + n) - rows_s(r), because a step reads the weights once. Or the time
            of the n rows alone without the fixed time of a step, if that is more. All of this is multiplied by the
            stage's crowding if stages share a machine.
        draft tokens: guess_s each, and ask_s for all drafts of a step, before the first stage computes.
        a link: rows x busy, plus its latency. busy is the time of one row, from transfer_busy_s of a microbatch.
            latency = transfer_s - busy.

    Raises PlanError if a device has two stages, because no formula describes how they share it.
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
        if rows == round(rows):  # then the predicted time of a microbatch is exact
            decode = Curve(tuple(sorted({**dict(curve.points), round(rows): stage.busy_s}.items())))
        draft = predicted.draft if i == 0 else None
        computes = partial(_computes, cache(curve.at), cache(decode.at), stage.crowding, draft)
        result.append(StageOrLink(stage.devices, computes))
        last = i + 1 == len(stages)
        # The cost model rounds rows of hidden states to whole rows, but not rows of logits.
        a_row = stage.transfer_busy_s / (rows if last else max(1, round(rows)))
        goes_to = owner if last else stages[i + 1].devices[0]
        latency_s = max(0.0, stage.transfer_s - a_row)
        sends = partial(_answers if last else _sends, a_row)
        result.append(StageOrLink((stage.devices[0], goes_to), sends, latency_s, is_link=True))
    return result


def capacity_per_s(predicted: Prediction, prompt: int, tokens: int) -> float:
    """Return the most requests per second that a plan can serve.

    prompt: tokens of each prompt; 1 for an input of an ONNX model.
    tokens: tokens to generate for each; 1 for an input of an ONNX model.

    With C requests in flight in groups of b, the result is the smaller of two rates:
        1 / max over stages and links of (prefill + (tokens - 1) / b decode steps of b rows - time saved by shared
        steps)
        C / (prefill alone + (tokens - 1) passes of b rows)
    Copies add up. With drafts and one request in flight, it is 1 / (prefill alone + (tokens - 1) x latency per token).
    """
    if predicted.copies:
        return sum(capacity_per_s(copy, prompt, tokens) for copy in predicted.copies)
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
        if rows > 1 and others.prompts:  # other requests decode in the prefill steps of this one
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
    """Return the rows of each chunk of a prompt while no request decodes. All chunks are equal.

    stages: number of stages; the chunk count is that of `partition.predict.cost`.
    """
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
    step_s = 2 * prompt_s(1) - prompt_s(2)  # fixed time of a step
    for alone_s, rows in (*alone, (decode_s(step.decodes) if step.decodes else 0.0, step.decodes)):
        if before and rows:  # only the last prompt row has logits, so a prompt's curve may be too low
            alone_s = min(alone_s, max(0.0, alone_s - step_s, prompt_s(before + rows) - prompt_s(before)))
        seconds, before = seconds + alone_s, before + rows
    drafts_s = 0.0 if draft is None else draft.waiting_s(step.drafts + step.follows)
    return crowding * seconds + drafts_s


def _sends(a_row: float, step: SimulatedStep) -> float:
    return a_row * step.rows


def _answers(a_row: float, step: SimulatedStep) -> float:
    """Return the time to send results. A prompt returns one row of logits, at its end."""
    return a_row * (len(step.requests) + step.drafts)
