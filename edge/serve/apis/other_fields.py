"""Known but unsupported fields, of other servers and of other parts of the APIs.

A field is refused if the answer would be wrong without it. A field that is only a hint or an optimization is ignored,
and the header `X-Edge-Ignored` names it. docs/serve.md has both lists. Tests compare them with the types of the
official clients, so that every field of these clients is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Refused = Mapping[str, tuple[Any, ...]]
"""Refused fields, each with its neutral values in addition to those of `is_empty`."""


def _refused(any_value: str = "", **neutral: tuple[Any, ...]) -> Refused:
    """Return refused fields: those in any_value with any value, the others unless the value is neutral."""
    return {**dict.fromkeys(any_value.split(), ()), **neutral}


LLAMA_REFUSED = _refused(any_value="grammar_lazy multimodal_data")
# Minor sampling options, cache placement, time limits, response format and extra figures.
LLAMA_IGNORED = frozenset(
    "add_generation_prompt cache_prompt dynatemp_exponent dynatemp_range grammar_triggers id_slot min_keep mirostat"
    " mirostat_eta mirostat_tau n_cache_reuse n_discard n_indent n_keep parse_tool_calls post_sampling_probs"
    " reasoning_format repeat_last_n response_fields return_progress return_tokens samplers sse_ping_interval"
    " t_max_predict_ms t_max_prompt_ms thinking_forced_open timings_per_token top_n_sigma".split()
)
VLLM_REFUSED = _refused(
    any_value="allowed_token_ids bad_words chat_template documents logits_processors prompt_logprobs stop_token_ids"
    " use_beam_search",
)  # fmt: skip
VLLM_IGNORED = frozenset(
    "best_of length_penalty request_id skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens".split()
)

# Fields for providers with many users or with stored data, tools that a provider runs during an answer, and hints.
# This server has none of these.
OPENAI_IGNORED = frozenset(
    "metadata moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier"
    " service_tier store user verbosity web_search_options".split()
)
# Thinking fields that only chats support.
THINKING_IGNORED = frozenset({"reasoning_budget", "thinking_budget_tokens"})
CHAT_REFUSED = _refused(any_value="echo prompt suffix", modalities=(["text"],))
CHAT_IGNORED = OPENAI_IGNORED | {"audio", "n_probs"}
COMPLETIONS_REFUSED = _refused(any_value="echo")
COMPLETIONS_IGNORED = OPENAI_IGNORED | THINKING_IGNORED | {"chat_template_kwargs", "continue_final_message"}
GUIDED = "guided_choice guided_grammar guided_json guided_regex structured_outputs"  # fields of chats and completions
# Fields of chats that responses lack, and unsupported fields of responses.
RESPONSES_REFUSED = _refused(
    any_value="background continue_final_message conversation grammar image json_schema lark logit_bias"
    f" previous_response_id prompt regex {GUIDED}",
    n=(0, 1), response_format=({"type": "text"},),
)  # fmt: skip
RESPONSES_IGNORED = OPENAI_IGNORED | THINKING_IGNORED | frozenset(
    # An input that is too long is refused instead of truncated, so `truncation` has no effect.
    "access_programs background_options context_management logprobs max_tool_calls n_probs truncation".split()
)  # fmt: skip
MESSAGES_REFUSED = _refused(
    any_value=f"grammar json_schema lark logit_bias prompt regex thread {GUIDED}",
    n=(0, 1), response_format=({"type": "text"},),
)  # fmt: skip
MESSAGES_IGNORED = THINKING_IGNORED | frozenset(
    "betas billing_policy cache_control compaction container context_management continue_final_message diagnostics"
    " fallback_credit_token"
    " fallbacks inference_geo mcp_servers metadata n_probs service_tier speed user_profile_id workspace_id".split()
)

# Values without effect, in addition to those of `is_empty`: the defaults of servers that have these fields.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "background": (False,), "best_of": (0, 1), "cache_prompt": (True,),
    "dynatemp_exponent": (1,), "dynatemp_range": (0,), "frequency_penalty": (0,), "id_slot": (-1,),
    "length_penalty": (1,), "min_keep": (0,), "mirostat": (0,), "mirostat_eta": (0.1,), "mirostat_tau": (5,),
    "min_p": (0,), "modalities": (["text"],), "n_cache_reuse": (0,), "n": (0, 1), "n_discard": (0,), "n_indent": (0,),
    "n_keep": (0,), "n_probs": (0,), "parse_tool_calls": (True,), "presence_penalty": (0,), "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"), "repeat_last_n": (64, 0), "repeat_penalty": (1,),
    "repetition_penalty": (1,), "seed": (-1,), "stop": ([""],), "temperature": (1,), "top_k": (-1, 0), "top_p": (1,),
    "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "speed": ("standard",), "t_max_predict_ms": (0, -1), "t_max_prompt_ms": (0, -1), "tfs_z": (1,),
    "thinking_budget_tokens": (-1,), "tool_choice": ("auto",), "top_n_sigma": (0, -1), "truncate": (True,),
    "truncate_prompt_tokens": (-1,), "truncation": ("disabled",), "typical_p": (1,), "verbosity": ("medium",),
}  # fmt: skip

# Supported alternatives to some of these fields.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("json_schema", *GUIDED.split()), "use text.format, or output_config.format"),
    "response_format": "use text.format, or output_config.format",
    "stop_token_ids": "use stop",
}


def is_empty(value: Any) -> bool:
    """Return True if a value has no effect in any field."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return True if a value has no effect in a field with these neutral values. 1 and True differ, as do 0 and
    False."""
    if is_empty(value):
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def refusal(field: str) -> str:
    """Return the reason why a field is refused."""
    return f"{field} is not supported, and would change the answer; {INSTEAD.get(field, 'leave it out')}"
