"""What becomes of every field that requests of OpenAI, vLLM, SGLang, llama.cpp, Anthropic and Ollama have.

A field is served where the body of its path reads it. Any other stands here: under REFUSED where it would change what is answered, else under
IGNORED, with the reason. What stands nowhere is left out, but for a name that begins like a sampling parameter's: that would change the answer,
too. `docs/reference/fields.md` is made of these tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """reason: why, and what to do instead.  off: values that ask for nothing, and are taken."""

    reason: str
    off: Sequence[Any] = (None, False, "", [], {})

    def asks(self, value: Any) -> bool:
        """Whether a value asks for what is not there."""
        return value not in self.off


OFF: Sequence[Any] = (None, False, "", [], {})
PICTURES = "It is about pictures, sound or video, which are not read here."
CLUSTER = "It says which machine of a cluster answers."
BILLING = "It is about accounts and billing."
NAMES = "It names a request, a user or a session; every answer has an id of its own."
CACHING = "Beginnings of prompts are always kept, and found again."
MEMORY = "Memory and threads are the server's own: its options set them."
WHEN = "It says when text is sent, and not which."
UNREAD = "It only has a meaning beside a field that is refused."
NO_LORA = "Adapters are not chosen by request. Serve a model that the adapter is merged into."
ITS_TEMPLATE = "The model's own template is used. Render the text yourself and ask /v1/completions."
BUDGET = "Texts without a conversation have no thoughts to bound. Use /v1/chat/completions, or max_tokens."
THOUGHTS = "Thoughts are told as they are, and the template says which of earlier turns the model reads."
ONE_CALL = "Nothing is stored from one request to the next. Send the whole conversation."
SALT = "Beginnings of prompts that are kept are shared by all requests. Leave it out where they may be."
DRY = "There is no DRY penalty. Use repetition_penalty, frequency_penalty or presence_penalty."
LAZY = "A grammar holds from the first token. Use tools for calls that may come."
LOGPROBS_MODE = (
    "Use logprobs, with logprobs_mode 'processed' for those of the distribution that is sampled from."
)
IDS = "Use return_token_ids."
CHATS_TELL = "Use /v1/chat/completions or /v1/completions, which tell it."

REFUSED: Mapping[str, Refused] = {
    "decoding": Refused(
        "all requests of a server follow one decoding method, which it is started with (polydraft serve --decoding); /v1/models names it."
    ),
    "use_beam_search": Refused("There is no beam search. Use n for several samples."),
    "beam_width": Refused("There is no beam search. Use n for several samples."),
    "num_beams": Refused("There is no beam search. Use n for several samples.", (*OFF, 1)),
    "length_penalty": Refused("It belongs to beam search, which is not there. Use max_tokens.", (*OFF, 1)),
    "early_stopping": Refused("It belongs to beam search, which is not there. Use stop."),
    "bad_words": Refused("Use logit_bias for tokens, or structured_outputs.regex for texts."),
    "allowed_token_ids": Refused("Use structured_outputs, or logit_bias."),
    "logprob_token_ids": Refused("Use logprobs and top_logprobs, which tell the most likely tokens."),
    "logits_processors": Refused("No code of requests is run. Use logit_bias or structured_outputs."),
    "custom_logit_processor": Refused("No code of requests is run. Use logit_bias or structured_outputs."),
    "vllm_xargs": Refused("It is read by extensions of vLLM, which are not there."),
    "prompt_embeds": Refused("Prompts are text or token ids."),
    "input_embeds": Refused("Prompts are text or token ids."),
    "embed_overrides": Refused("Prompts are text or token ids."),
    "embed_override_token_id": Refused("Prompts are text or token ids."),
    "input_ids": Refused("Use the prompt of /v1/completions, which may be token ids."),
    "truncate_prompt_tokens": Refused("Prompts are not cut. Shorten it, or send the token ids that are to stay."),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"), Refused(BUDGET, (*OFF, -1))),
    "reasoning_control": Refused(BUDGET),
    "watermarking": Refused("Texts are not marked: that would change their distribution."),
    "watermark": Refused("Texts are not marked: that would change their distribution."),
    "repetition_detection": Refused("A text that repeats itself is not ended. Use repetition_penalty, stop or max_tokens."),
    "no_repeat_ngram_size": Refused("Use repetition_penalty, frequency_penalty or presence_penalty."),
    "stop_regex": Refused("Texts end at strings and tokens. Use stop or stop_token_ids, or structured_outputs.regex."),
    "documents": Refused("Put them into a message."),
    "chat_template": Refused(ITS_TEMPLATE),
    "generation_prompt": Refused(ITS_TEMPLATE),
    "chat_parser": Refused(ITS_TEMPLATE),
    "task": Refused("It asks for a template of its own. Put the task into a message."),
    "parse_tool_calls": Refused("Calls are always told apart from text. Leave tools out for text alone.", (None, True)),
    "functions": Refused("Use tools."),
    "function_call": Refused("Use tool_choice."),
    "web_search_options": Refused("The server searches nothing. Offer a tool, and run it yourself."),
    "mcp_servers": Refused("The server runs no tools. Offer them in tools, and run them yourself."),
    "container": Refused("The server runs no tools. Offer them in tools, and run them yourself."),
    "audio": Refused("Answers are text."),
    "images": Refused("Pictures, sound and files are not read here. Send text."),
    "moderation": Refused("Nothing is moderated here. Check texts yourself."),
    "lora": Refused(NO_LORA),
    "lora_path": Refused(NO_LORA),
    "cache_salt": Refused(SALT),
    "extra_key": Refused(SALT),
    "session_params": Refused(ONE_CALL),
    "previous_input_messages": Refused(ONE_CALL),
    "previous_response_id": Refused(ONE_CALL),
    "conversation": Refused(ONE_CALL),
    "thread": Refused(ONE_CALL),
    "background": Refused("A response is answered at once. Use stream for long ones."),
    "compaction": Refused("No conversation is summarised here. Ask for a summary in a message."),
    "personality": Refused("Say it in instructions."),
    "kv_transfer_params": Refused("One server reads the prompt and answers."),
    "ec_transfer_params": Refused("One server reads the prompt and answers."),
    "return_hidden_states": Refused("Use /v1/embeddings, which gives their mean."),
    "return_routed_experts": Refused("Experts are not told."),
    "return_sampling_mask": Refused("Tokens that may be sampled are not told. Use top_logprobs."),
    "return_meta_info": Refused("Use usage, logprobs and return_token_ids."),
    "return_input_ids_in_sglext": Refused(IDS),
    "return_output_ids_in_sglext": Refused(IDS),
    "return_flat_raw_output_top_logprobs": Refused("Use logprobs and top_logprobs."),
    "sampling_logprobs_mode": Refused(LOGPROBS_MODE),
    "post_sampling_probs": Refused(LOGPROBS_MODE),
    "enable_response_messages": Refused("Use return_token_ids of chats."),
    "return_tokens": Refused(IDS),
    "return_token_ids": Refused(CHATS_TELL),
    "return_tokens_as_token_ids": Refused(CHATS_TELL),
    "prompt_logprobs": Refused(CHATS_TELL),
    "n_probs": Refused(CHATS_TELL),
    "return_prompt_text": Refused(CHATS_TELL),
    "echo": Refused(CHATS_TELL),
    "include_reasoning": Refused("Thoughts are told. Leave them unread.", (None, True)),
    "separate_reasoning": Refused("Thoughts are told apart from the answer.", (None, True)),
    "reasoning_format": Refused("Thoughts are told apart from the answer.", (None, "auto", "deepseek")),
    "add_special_tokens": Refused("The template writes special tokens.", (None, False)),
    "min_keep": Refused("Truncation always leaves one token. Use top_k, top_p and min_p."),
    "mirostat": Refused("There is no Mirostat. Use top_p or min_p."),
    "dry_multiplier": Refused(DRY),
    "xtc_probability": Refused("There is no XTC. Use temperature, top_p or min_p."),
    "dynatemp_range": Refused("The temperature is the same for all tokens. Use temperature."),
    "top_a": Refused("Use min_p."),
    "top_n_sigma": Refused("Use min_p.", (*OFF, -1)),
    "typical_p": Refused("Use top_p or min_p.", (*OFF, 1)),
    "tfs_z": Refused("Use top_p or min_p.", (*OFF, 1)),
    "adaptive_target": Refused("The target is the model's own distribution. Use temperature.", (*OFF, -1)),
    "penalize_newline": Refused("Line ends are penalised as any token is.", (None, True)),
    "samplers": Refused("Their order is penalties, temperature, top_k, top_p, min_p. /completion takes what keeps to it."),
    "n_indent": Refused("A text is not ended by its indentation. Use stop."),
    "grammar_lazy": Refused(LAZY),
    "grammar_triggers": Refused(LAZY),
    "guided_whitespace_pattern": Refused("JSON is written as Python's json.dumps does. Use structured_outputs.grammar for another form."),
}  # fmt: skip
"""By name, on every path that does not serve it."""

IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("user", "user_profile_id", "safety_identifier", "request_id", "rid", "session_id", "custom_labels"), NAMES),
    **dict.fromkeys(("metadata", "store"), "Nothing is stored."),
    **dict.fromkeys(("service_tier", "priority", "speed", "inference_geo", "provider"), "All requests are served alike, first come, first served."),
    **dict.fromkeys(("workspace_id", "billing_policy", "fallback_credit_token"), BILLING),
    **dict.fromkeys(("access_programs", "fallbacks", "diagnostics", "betas"), "It is about the models and rules of another host."),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control", "cache_prompt", "n_cache_reuse"), CACHING),
    **dict.fromkeys(("id_slot", "keep_alive"), "Slots and models are taken as they come free."),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs", "image", "images_config", "video_config"), PICTURES),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "width", "height", "steps"), PICTURES),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"), CLUSTER),
    **dict.fromkeys(("stream_interval", "stream_reasoning", "sse_ping_interval", "return_progress"), WHEN),
    **dict.fromkeys(("truncation_side", "padding", "custom_params", "background_options", "routed_experts_prompt_start"), UNREAD),
    **dict.fromkeys(("routed_experts_start_len", "return_flat_raw_top_logprobs_b64", "grammar_type", "preserved_tokens"), UNREAD),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "adaptive_decay"), UNREAD),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), UNREAD),
    **dict.fromkeys(("reasoning_budget_start_tag", "reasoning_budget_end_tags", "reasoning_budget_end_tag", "reasoning_budget_message"), UNREAD),
    **dict.fromkeys(("guided_decoding_backend", "backend_sampling", "chat_format"), "How it is computed changes nothing."),
    **dict.fromkeys(("n_keep", "n_discard", "num_keep"), "A context is not shifted: a text ends where it is full."),
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"), MEMORY),
    **dict.fromkeys(("numa", "embedding_only", "num_thread"), MEMORY),
    **dict.fromkeys(("return_cached_tokens_details", "return_spec_tokens_details", "verbose", "timings_per_token"), "usage tells it unasked."),
    "spaces_between_special_tokens": "Special tokens are written without spaces.",
    "return_token_offsets": "vLLM tells them where it renders alone, and not in answers.",
    "verbosity": "It is a hint to OpenAI's models.",
    "context_management": "Nothing of a conversation is cleared while it fits; what does not fit is refused.",
    **dict.fromkeys(("truncation", "truncate", "shift"), "An input that fits is not cut; one that does not is refused."),
    "max_tool_calls": "It counts calls that a host runs itself; here the client runs them.",
    "reasoning_details": "It is told in answers of other hosts.",
    "t_max_prompt_ms": "No text is cut by the clock.",
    "t_max_predict_ms": "No text is cut by the clock; n_predict bounds it.",
}  # fmt: skip
"""By name: why it changes no answer."""

BY_GROUP: Mapping[str, Mapping[str, Refused | str]] = {
    "embeddings": {
        **dict.fromkeys(("add_generation_prompt", "continue_final_message", "chat_template_kwargs"), UNREAD),
        "cache_salt": "Nothing is kept of texts that are embedded.",
        "messages": Refused("Give input."),
        "content": Refused("Give input."),
        "embd_normalize": Refused("Embeddings have length one.", (None, 2)),
        "use_activation": Refused("Embeddings have length one.", (None, True)),
        "embed_dtype": Refused("They are in 32 bits.", (None, "float32")),
        "endianness": Refused("Their bytes are little-endian.", (None, "native", "little")),
    },
    "completion": {"stream_options": "The last event tells the usage."},
    "infill": {
        "stream_options": "The last event tells the usage.",
        "n_indent": "Editors cut the text by its indentation themselves.",
    },
    "responses": {"prompt": Refused("Prompts are not stored here. Send input and instructions.")},
    "structured_outputs": {
        "structural_tag": Refused("Use tools, or another form."),
        "whitespace_pattern": Refused(
            "JSON is written as Python's json.dumps does. Use grammar for another form."
        ),
        "disable_additional_properties": Refused("Set additionalProperties to false in the schema."),
        "disable_any_whitespace": "JSON is always written as Python's json.dumps does.",
    },
    "reasoning": dict.fromkeys(("context", "generate_summary", "mode", "summary"), THOUGHTS),
    "output_config": {"task_budget": "It is a hint to Anthropic's models."},
    "thinking": {
        "display": THOUGHTS,
    },
    "generate": {
        "template": Refused("The model's own template is used. Use raw for a text that is rendered already.")
    },
}
"""Where a field has another fate in requests of one kind."""

SAMPLING_PREFIXES = (
    "allowed_token", "banned_", "bad_words", "beam_", "dry_", "dynatemp", "epsilon_cutoff", "eta_cutoff", "exponential_decay", "forced_",
    "frequency_", "grammar", "guided_", "json_schema", "length_pen", "logit", "logprob", "max_new", "max_tokens", "min_length", "min_new", "min_p",
    "min_tokens", "mirostat", "n_predict", "n_probs", "no_repeat", "penalty_", "presence_", "prompt_logprob", "regex", "repeat_", "repetition_", "sample",
    "seed", "smoothing_", "stop", "structured_", "suppress_", "temperature", "tfs", "top_", "truncat", "typical", "xtc_",
)  # fmt: skip
"""How names of sampling parameters begin."""


def refusal(group: str, name: str) -> Refused | None:
    """Of a field that a kind of request does not serve; None: it may be left out.

    Example:
        >>> refusal("chats", "use_beam_search").reason, refusal("chats", "user")
        ('There is no beam search. Use n for several samples.', None)
    """
    fate = BY_GROUP.get(group, {}).get(name) or REFUSED.get(name)
    return fate if isinstance(fate, Refused) else None


def why_ignored(group: str, name: str) -> str | None:
    """Why a field that is not served changes nothing; None: nobody has said so."""
    fate = BY_GROUP.get(group, {}).get(name) or IGNORED.get(name)
    return fate if isinstance(fate, str) else None


def is_like_sampling(name: str) -> bool:
    """Whether a name begins like one of sampling parameters.

    Example:
        >>> is_like_sampling("top_b"), is_like_sampling("traceparent")
        (True, False)
    """
    return name.startswith(SAMPLING_PREFIXES)


_VLLM = """
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval
"""
_SGLANG = """
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank return_hidden_states return_routed_experts
    routed_experts_start_len return_cached_tokens_details return_spec_tokens_details return_token_ids top_k min_p min_tokens regex ebnf
    repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params
    images_config mm_processor_kwargs custom_logit_processor custom_params watermark rid extra_key cache_salt priority data_parallel_rank
"""
_LLAMA_CPP = """
    verbose timings_per_token stream stream_options cache_prompt return_progress sse_ping_interval n_predict max_tokens n_indent n_keep n_discard
    n_cmpl n n_cache_reuse t_max_prompt_ms t_max_predict_ms top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p temperature
    dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs min_keep backend_sampling post_sampling_probs
    lora dry_sequence_breakers json_schema grammar grammar_lazy preserved_tokens grammar_triggers logit_bias ignore_eos stop samplers id_slot
    return_tokens
"""
_THINKING = """
    chat_format reasoning_format generation_prompt parse_tool_calls chat_parser echo reasoning_control reasoning_budget_tokens
    reasoning_budget_start_tag reasoning_budget_end_tags reasoning_budget_end_tag reasoning_budget_message thinking_budget_tokens
"""
_SAMPLED = "frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature top_p user"
_OPENAI_CHAT = f"""
    {_SAMPLED} messages model top_logprobs max_completion_tokens response_format tools tool_choice reasoning_effort parallel_tool_calls
"""
_OPENAI_RESPONSES = """
    background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls previous_response_id reasoning
    service_tier store stream temperature text tool_choice tools top_logprobs top_p truncation user
"""
_ANTHROPIC = "model messages max_tokens metadata stop_sequences stream system temperature thinking tool_choice tools top_k top_p output_config"
_ANTHROPIC_COUNT = "model messages system thinking tool_choice tools output_config"

FIELDS: Mapping[str, Mapping[str, str]] = {
    "chats": {
        "OpenAI": f"""{_OPENAI_CHAT} audio function_call functions metadata modalities moderation prediction prompt_cache_key prompt_cache_options
            prompt_cache_retention safety_identifier service_tier store verbosity web_search_options""",
        "vLLM": f"""{_OPENAI_CHAT} {_VLLM} include_reasoning echo add_generation_prompt continue_final_message add_special_tokens documents
            chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""",
        "SGLang": f"""{_OPENAI_CHAT} {_SGLANG} return_prompt_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
            return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 thinking task
            continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video
            video_config input_ids""",
        "llama.cpp": f"""{_OPENAI_CHAT} {_LLAMA_CPP} {_THINKING} add_generation_prompt continue_final_message chat_template_kwargs""",
    },
    "completions": {
        "OpenAI": f"{_SAMPLED} model prompt best_of echo suffix",
        "vLLM": f"{_SAMPLED} {_VLLM} model prompt echo suffix prompt_embeds add_special_tokens response_format",
        "SGLang": f"{_SAMPLED} {_SGLANG} model prompt best_of echo suffix json_schema response_format custom_labels",
        "llama.cpp": f"{_SAMPLED} {_LLAMA_CPP} model prompt echo",
    },
    "responses": {
        "OpenAI": f"""{_OPENAI_RESPONSES} access_programs background_options context_management conversation image moderation prompt prompt_cache_key
            prompt_cache_options prompt_cache_retention safety_identifier stream_options""",
        "vLLM": f"""{_OPENAI_RESPONSES} logit_bias prompt include_reasoning top_k min_p skip_special_tokens include_stop_str_in_output presence_penalty
            frequency_penalty prompt_cache_key watermarking request_id session_id media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs
            cache_salt enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop stop_token_ids ignore_eos vllm_xargs
            kv_transfer_params ec_transfer_params chat_template_kwargs""",
        "SGLang": f"""{_OPENAI_RESPONSES} bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank chat_template_kwargs request_id
            session_id priority extra_key cache_salt data_parallel_rank frequency_penalty presence_penalty stop top_k min_p repetition_penalty""",
    },
    "input_tokens": {
        "OpenAI": "conversation input instructions model parallel_tool_calls personality previous_response_id reasoning text tool_choice tools truncation",
    },
    "messages": {
        "Anthropic": f"""{_ANTHROPIC} cache_control container diagnostics inference_geo service_tier speed user_profile_id workspace_id billing_policy
            compaction context_management fallback_credit_token fallbacks mcp_servers thread betas""",
        "vLLM": f"""{_ANTHROPIC} mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params ec_transfer_params vllm_xargs
            chat_template_kwargs""",
        "SGLang": f"{_ANTHROPIC} betas",
    },
    "count_tokens": {
        "Anthropic": f"""{_ANTHROPIC_COUNT} cache_control speed user_profile_id workspace_id billing_policy compaction context_management mcp_servers
            betas""",
        "vLLM": f"{_ANTHROPIC_COUNT} chat_template_kwargs",
        "SGLang": f"{_ANTHROPIC_COUNT} betas",
    },
    "embeddings": {
        "OpenAI": "input model dimensions encoding_format user",
        "vLLM": """input model dimensions encoding_format user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
            cache_salt add_special_tokens embed_dtype endianness use_activation messages add_generation_prompt continue_final_message chat_template
            chat_template_kwargs media_io_kwargs""",
        "SGLang": "input model dimensions encoding_format user rid priority lora_path embed_override_token_id embed_overrides",
        "llama.cpp": "input content model dimensions encoding_format embd_normalize",
    },
    "tokenize": {
        "vLLM": """model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message chat_template
            chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
        "SGLang": """model prompt messages tools tool_choice reasoning_effort continue_final_message chat_template_kwargs add_special_tokens
            add_generation_prompt""",
        "llama.cpp": "content add_special parse_special with_pieces",
    },
    "detokenize": {
        "vLLM": "model tokens",
        "SGLang": "model tokens skip_special_tokens",
        "llama.cpp": "tokens",
    },
    "completion": {"llama.cpp": f"{_LLAMA_CPP} prompt response_fields model"},
    "infill": {
        "llama.cpp": f"{_LLAMA_CPP} prompt response_fields model input_prefix input_suffix input_extra"
    },
    "ollama chat": {
        "Ollama": "model stream options format keep_alive messages tools think logprobs top_logprobs"
    },
    "generate": {
        "Ollama": """model stream options format keep_alive prompt suffix system template context raw images think logprobs top_logprobs width height
            steps""",
    },
    "embed": {"Ollama": "model input truncate options keep_alive dimensions"},
    "ollama embeddings": {"Ollama": "model prompt options keep_alive"},
    "stream_options": {
        "OpenAI": "include_usage include_obfuscation",
        "vLLM": "include_usage continuous_usage_stats",
        "SGLang": "include_usage continuous_usage_stats",
        "llama.cpp": "include_usage",
    },
    "structured_outputs": {
        "vLLM": """json regex choice grammar json_object disable_any_whitespace disable_additional_properties whitespace_pattern structural_tag""",
    },
    "reasoning": {"OpenAI": "context effort generate_summary mode summary", "SGLang": "effort summary"},
    "text": {"OpenAI": "format verbosity"},
    "output_config": {"Anthropic": "effort format task_budget"},
    "thinking": {"Anthropic": "type budget_tokens display"},
    "options": {
        "Ollama": """numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only num_thread num_keep
            seed num_predict top_k top_p tfs_z typical_p repeat_last_n temperature repeat_penalty presence_penalty frequency_penalty mirostat mirostat_tau
            mirostat_eta penalize_newline stop min_p""",
    },
}
"""By kind of request: the fields of each server or client that has it."""
