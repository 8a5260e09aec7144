"""Why the gateway does not do with a field what vLLM's server does: by field, or by route and field."""

_FILLED = "vLLM writes what the request left out"
_LAST = "parts but the last have no `usage`, in vLLM null"
_NULL = "`content` is null, in vLLM empty"

REASONS: dict[str, str] = {
    "truncation_side": "vLLM reads it beside `truncate_prompt_tokens`",
    "request_id": "answers have ids of the gateway's own",
    "stream_interval": "parts come at least 40 ms apart",
    "stream_options.continuous_usage_stats": "counts come at the end alone",
    "chat: tools": "no tools are an empty list, too",
    "chat: tool_choice: required": _NULL,
    "chat: tool_choice: named": _NULL,
    "chat: parallel_tool_calls": "vLLM leaves out blanks before a call",
    "responses: tools": f"{_FILLED}; its prompt begins with `<bos>` twice",
    "responses: tool_choice": _FILLED,
    "responses: tool_choice: required": _FILLED,
    "responses: tool_choice: named": _FILLED,
    "responses: text": _FILLED,
    "responses: text: json_object": _FILLED,
    "responses: service_tier": "answers do not repeat it",
    "responses: user": "answers do not repeat it",
    "responses: repetition_penalty": "vLLM's prompt begins with `<bos>` twice: the template's, and the tokenizer's",
    "generate: return_token_ids": "the prompt's are always there",
    "generate: stream_options": _LAST,
    "generate: stream_options.include_usage": _LAST,
    "generate: logprobs": "earlier versions of vLLM wrote `token`, which some clients insist on",
    "generate: prompt_logprobs": "ids are not decoded there",
    "detokenize: tokens": "the vocabulary has no such id",
}
