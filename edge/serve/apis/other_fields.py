"""Known fields that are not supported: those of other servers, and of other parts of the APIs.

A field that would change the answer is refused, unless its value asks for the default behaviour. Other fields are
ignored. docs/serve.md has both lists; the tests walk the types of the official clients, so that none is dropped in
silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Refused = Mapping[str, tuple[Any, ...]]
"""Fields, each with its neutral values beside null and false."""


def _refused(any_value: str = "", not_empty: str = "", **neutral: tuple[Any, ...]) -> Refused:
    """Return fields of which any value is refused, any list but an empty one, and any but neutral values."""
    return {**dict.fromkeys(any_value.split(), ()), **dict.fromkeys(not_empty.split(), ([],)), **neutral}


LLAMA_REFUSED = _refused(
    any_value="grammar_lazy ignore_eos post_sampling_probs return_tokens thinking_forced_open",
    not_empty="grammar_triggers multimodal_data response_fields samplers",
    add_generation_prompt=(True,), dynatemp_range=(0,), min_keep=(0,), mirostat=(0,), n_cmpl=(1,), n_indent=(0,),
    n_predict=(-1,), n_probs=(0,), parse_tool_calls=(True,),
    reasoning_format=("auto", "deepseek"), repeat_last_n=(64,), t_max_predict_ms=(0, -1),
    top_n_sigma=(0, -1),
)  # fmt: skip
# Places in the cache, figures beside the answer, and fields that matter only with refused ones.
LLAMA_IGNORED = frozenset(
    "cache_prompt dynatemp_exponent id_slot mirostat_eta mirostat_tau n_cache_reuse n_discard n_keep return_progress"
    " sse_ping_interval t_max_prompt_ms timings_per_token".split()
)

# Plug-ins of editors send these to /infill whatever the server is: less of them makes an answer longer, not wrong.
INFILL_IGNORED = frozenset("n_indent response_fields samplers t_max_predict_ms t_max_prompt_ms".split())

VLLM_REFUSED = _refused(
    any_value="chat_template enable_thinking guided_choice guided_grammar guided_json"
    " guided_regex include_stop_str_in_output prompt_logprobs structured_outputs use_beam_search",
    not_empty="allowed_token_ids bad_words documents logits_processors stop_token_ids",
    length_penalty=(1,), min_tokens=(0,), repetition_penalty=(1,), truncate_prompt_tokens=(-1,),
)  # fmt: skip
VLLM_IGNORED = frozenset("priority request_id skip_special_tokens spaces_between_special_tokens".split())

# Fields for a provider with many users, and for stored data: there is neither here.
OPENAI_IGNORED = frozenset(
    "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store"
    " user".split()
)
CHAT_REFUSED = _refused(
    any_value="audio echo json_schema prompt moderation suffix web_search_options",
    not_empty="functions",
    function_call=("none", "auto"), modalities=(["text"],), best_of=(1,), verbosity=("medium",),
)  # fmt: skip
# Fields that chats have.
OF_CHATS: dict[str, Any] = {"reasoning_budget": (-1,), "thinking_budget_tokens": (-1,), "continue_final_message": ()}
COMPLETIONS_REFUSED = _refused(
    any_value="echo json_schema",
    best_of=(1,), chat_template_kwargs=({},), **OF_CHATS,
)  # fmt: skip
# Fields of chats that responses do not have, and unsupported fields of responses.
RESPONSES_REFUSED = _refused(
    any_value="background conversation grammar image json_schema lark logprobs moderation previous_response_id"
    " prompt regex",
    not_empty="access_programs context_management stop",
    logit_bias=({},), n=(1,), response_format=({"type": "text"},), **OF_CHATS,
)  # fmt: skip
MESSAGES_REFUSED = _refused(
    any_value="compaction container context_management grammar json_schema lark output_format prompt regex seed"
    " thread",
    not_empty="fallbacks mcp_servers stop",
    frequency_penalty=(0,), logit_bias=({},), min_p=(0,), n=(1,), presence_penalty=(0,), repeat_penalty=(1,),
    response_format=({"type": "text"},), speed=("standard",), **OF_CHATS,
)  # fmt: skip
MESSAGES_IGNORED = frozenset(
    "betas billing_policy cache_control diagnostics fallback_credit_token inference_geo metadata service_tier"
    " user_profile_id workspace_id".split()
)

# Supported fields to use in place of some of them.
INSTEAD: Mapping[str, str] = {
    "enable_thinking": 'say chat_template_kwargs: {"enable_thinking": ...}',
    "guided_grammar": "say grammar or lark",
    "guided_json": "say response_format",
    "guided_regex": "say regex",
    "json_schema": "say response_format",
    "n_cmpl": "say n",
    "n_predict": "say max_tokens",
    "n_probs": "say logprobs",
    "output_format": "say output_config.format",
    "repetition_penalty": "say repeat_penalty",
    "structured_outputs": "say response_format",
}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value of a refused field is neutral. Here 1 is not True, and 0 not False."""
    if value is None or value is False:
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def refusal(field: str) -> str:
    """Return why a field is refused."""
    return f"{field} is not done here, and would change the answer; {INSTEAD.get(field, 'leave it out')}"
