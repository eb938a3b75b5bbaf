"""What an answer says of its own time and of its drafts, in the words of each server that clients know.

usage.speculation              polydraft's: steps, and acceptance by depth
timings                        llama.cpp's: tokens and milliseconds of prompt and text, drafted and accepted tokens
metrics.speculative_decoding   vLLM's: mean length of a step, and how many steps accepted so many tokens
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from polydraft.engine.stats import RequestStats


def timings(num_prompt: int, stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Tokens, and milliseconds by the wall of reading the prompts and of generating, as llama.cpp's server tells them.

    Generating begins behind the first step, whose tokens are in no rate: llama.cpp leaves out the first token, which came with the prompt.
    num_prompt: tokens of all prompts.  stats: of all samples; they run side by side, so the longest time counts.

    Example:
        >>> timings(5, [RequestStats(generated_tokens=3, cached_tokens=1, drafted_tokens=4, accepted_tokens=2)])["prompt_n"]
        4
    """
    cached = min((s.cached_tokens for s in stats), default=0)
    read = num_prompt - cached
    generated = sum(s.generated_tokens for s in stats)
    later = generated - sum(s.first_tokens for s in stats)
    reading = 1000 * max((s.reading_seconds for s in stats), default=0.0)
    writing = 1000 * max((s.writing_seconds for s in stats), default=0.0)
    return {
        "cache_n": cached,
        "prompt_n": read,
        **_timed("prompt", read, reading),
        "predicted_n": generated,
        **_timed("predicted", later, writing),
        "draft_n": sum(s.drafted_tokens for s in stats),
        "draft_n_accepted": sum(s.accepted_tokens for s in stats),
    }


def _timed(name: str, count: int, milliseconds: float) -> dict[str, Any]:
    return {
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count else 0.0,
        f"{name}_per_second": 1000 * count / milliseconds if milliseconds else 0.0,
    }


def speculative_decoding(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Acceptance of a request, as vLLM tells it.

    acceptance_histogram[k]: steps that accepted k drafted tokens.  num_draft_tokens: nodes of all trees, of which a step accepts a path.
    num_spec_tokens: tokens of the longest path that was drafted.

    Example:
        >>> stats = RequestStats()
        >>> stats.record(num_nodes=4, depth=4, num_accepted=2)
        >>> found = speculative_decoding([stats])
        >>> found["mean_acceptance_length"], found["acceptance_histogram"]
        (3.0, [0, 0, 1, 0, 0])
    """
    steps = sum(s.steps for s in stats)
    drafted = sum(s.drafted_tokens for s in stats)
    accepted = sum(s.accepted_tokens for s in stats)
    reached = [steps, *_by_depth(stats, "accepted_by_depth"), 0]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [reached[k] - reached[k + 1] for k in range(len(reached) - 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(reached) - 2,
    }


def drafts_of(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """What drafts were worth, of some samples together."""
    steps = sum(s.steps for s in stats)
    drafted = _by_depth(stats, "drafted_by_depth")
    accepted = _by_depth(stats, "accepted_by_depth")
    return {
        "steps": steps,
        "tokens_per_step": sum(s.generated_tokens for s in stats) / steps if steps else 0.0,
        "drafted_tokens": sum(s.drafted_tokens for s in stats),
        "accepted_tokens": sum(s.accepted_tokens for s in stats),
        "acceptance_by_depth": [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)],
    }


def _by_depth(stats: Sequence[RequestStats], name: str) -> list[int]:
    return [sum(counts) for counts in zip_longest(*(getattr(s, name) for s in stats), fillvalue=0)]
