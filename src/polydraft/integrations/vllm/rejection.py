"""A verifier of polydraft in the place of vLLM's rejection sampler: the runner's attribute of that name, called with the logits of all chains.

    target rows   logits behind each token that precedes a drafted one      bonus row   behind the last, one a request
    p             softmax of these rows after penalties, masks, temperature, top-k and top-p, as vLLM has them
    q             `draft_probs`, where the proposer gives them; else drafts are deterministic and meet the match verifier

On a CPU, vLLM 0.32 makes p from memory that it never wrote: `expand_batch_to_tokens` allocates a row of temperatures
(v1/sample/rejection_sampler.py), its C++ kernel fills a copy of other type (`_expand_kernel_impl`, utils/cpu_triton_utils.py), and the copy
is dropped. Nothing here calls it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm.v1.outputs import SamplerOutput  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.rejection_sampler import RejectionSampler  # pyright: ignore[reportMissingImports]

from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape, Verifier, Walking
from polydraft.errors import IncompatibleError
from polydraft.models.torch.door import out
from polydraft.sampling.softmax import softmax
from polydraft.verifiers.match import match


def install(runner: Any, verifier: Verifier) -> None:
    """Give a runner of vLLM the verifier.

    Raises:
        IncompatibleError: a runner that schedules ahead of its tokens beside a verifier by races.
    """
    if verifier.info.shared_noise:
        if getattr(runner, "use_async_scheduling", False):
            raise IncompatibleError(
                f"the verifier {verifier.info.name!r} was given beside asynchronous scheduling; expected to know the length of each text, which "
                "its noise belongs to. Start vLLM with --no-async-scheduling, or choose block."
            )
        runner.sampler.topk_topp_sampler = Racing(runner, verifier)
    if getattr(runner, "speculative_config", None) is not None:
        runner.rejection_sampler = Deciding(runner, verifier)
        _norm_final_state(runner)


def _norm_final_state(runner: Any) -> None:
    """Give an EAGLE-3 head that was trained on normed final states what it was trained on; see `heads.export`."""
    draft = getattr(runner.speculative_config, "draft_model_config", None)
    if not getattr(getattr(draft, "hf_config", None), "norm_final_state", False):
        return
    load = runner.drafter.load_model

    def load_model(target: Any, *args: Any, **kwargs: Any) -> None:
        load(target, *args, **kwargs)
        head = runner.drafter.model
        norm = target.model.norm
        combine = head.combine_hidden_states

        def combined(states: Float[Tensor, "T S"]) -> Tensor:
            *others, last = states.split(norm.weight.shape[0], -1)
            return combine(torch.cat([*others, norm(last)], -1))

        head.combine_hidden_states = combined

    runner.drafter.load_model = load_model


def _constrained(
    logits: Float[Tensor, "R V"], sampling: Any, request: Int[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """Logits after temperature, top-k and top-p; of greedy requests the largest alone. request: of each row."""
    if sampling.all_greedy:
        return _hardened(logits)
    temperature = sampling.temperature[request]
    greedy = temperature < 1e-5
    logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    top_k, top_p = (None if x is None else x[request] for x in (sampling.top_k, sampling.top_p))
    logits = apply_top_k_top_p(logits, top_k, top_p)
    return torch.where(greedy[:, None], _hardened(logits), logits) if greedy.any() else logits


def _hardened(logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    return torch.full_like(logits, -torch.inf).scatter_(1, logits.argmax(1, keepdim=True), 0.0)


def _keys(
    runner: Any, generators: Mapping[int, torch.Generator], num_requests: int, *, seeded: bool
) -> NoiseKey:
    """Noise of each request. seeded: a function of its seed and its length, so that drafts do not matter; else fresh, from its generator."""
    lengths = [int(n) for n in runner.input_batch.num_tokens_no_spec[:num_requests]]
    fresh = torch.randint(2**62, (num_requests,)).tolist()
    for b, generator in generators.items():
        if b < num_requests:
            fresh[b] = generator.initial_seed() if seeded else _drawn(generator)
    return NoiseKey.of(fresh, [0] * num_requests, lengths)


def _drawn(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (1,), generator=generator, device=generator.device))


def _decide(
    verifier: Verifier, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey
) -> list[list[int]]:
    """The tokens of each row: by the verifier's fused walk, else by its verdict."""
    rows = out(logits)
    if verifier.info.shared_noise:
        draft = replace(draft, noise=key)
    outcome = verifier.walk(draft, rows, key) if isinstance(verifier, Walking) else None
    if outcome is None:
        outcome = verifier(draft, softmax(rows)).sample(key)
    return outcome.emitted(draft.tree)


class Deciding(RejectionSampler):
    """vLLM's rejection sampler with the verifier; arguments of a call and its result are those of vLLM's.

    Drafts without probabilities meet the match verifier where `verifier` needs q: it accepts as much of them as any verifier can.
    """

    def __init__(self, runner: Any, verifier: Verifier) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self.runner = runner
        self.verifier = verifier

    def forward(
        self,
        metadata: Any,
        draft_probs: Float[Tensor, "T V"] | None,
        logits: Float[Tensor, "R V"],
        sampling_metadata: Any,
    ) -> SamplerOutput:
        """What the runner calls after each forward pass with drafts. T: drafted tokens of all requests, R: T and a bonus row each."""
        counts = metadata.num_draft_tokens
        raw = logits[metadata.target_logits_indices].float()
        last = logits[metadata.bonus_logits_indices].float()
        behind = self.apply_logits_processors(raw.clone(), sampling_metadata, metadata)
        bonus = self.sampler.apply_logits_processors(
            last.clone(), sampling_metadata, predict_bonus_token=True
        )
        processed = _constrained(
            torch.cat([behind, bonus]), sampling_metadata, _request_of_rows(counts, logits.device)
        )
        needs_q = DraftSampling.POINT_MASS not in self.verifier.info.draft_sampling
        verifier = match if draft_probs is None and needs_q else self.verifier
        drafted = _named(metadata.draft_token_ids, processed, draft_probs)
        draft, rows = _chains(drafted, counts, draft_probs, verifier)
        key = _keys(self.runner, sampling_metadata.generators, len(counts), seeded=verifier.info.shared_noise)
        outcome = _decide(verifier, draft, processed[rows.to(logits.device)], key)
        tokens = _padded(outcome, metadata.max_spec_len + 1).to(logits.device)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            rows_seen = (
                processed.split([len(behind), len(bonus)]) if self.is_processed_logprobs_mode else (raw, last)
            )
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs, metadata, logits, *rows_seen, tokens
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _request_of_rows(counts: list[int], device: torch.device) -> Int[Tensor, " R"]:
    """The request of each drafted token's row, and then of each bonus row."""
    requests = torch.arange(len(counts), device=device)
    return torch.cat([requests.repeat_interleave(torch.tensor(counts, device=device)), requests])


def _padded(emitted: Sequence[Sequence[int]], length: int) -> Int[Tensor, "B L"]:
    """Tokens of all requests, with vLLM's placeholder behind them."""
    tokens = torch.full((len(emitted), length), -1, dtype=torch.int32)
    for b, row in enumerate(emitted):
        tokens[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return tokens


def _named(
    drafted: Int[Tensor, " T"], processed: Float[Tensor, "R V"], probs: Float[Tensor, "T V"] | None
) -> Int[Tensor, " T"]:
    """Drafted tokens, with one that the target bars too in the place of each that a grammar barred: vLLM replaces those by -1, and a sampled
    one still has to count as a try that failed."""
    drafted = drafted.long()
    lost = (drafted < 0).nonzero().flatten()
    if len(lost):
        barred = processed[lost] == -torch.inf
        likely = barred.float() if probs is None else torch.where(barred, probs[lost], -1.0)
        drafted = drafted.index_copy(0, lost, likely.argmax(1))
    return drafted


def _chains(
    drafted: Int[Tensor, " T"], counts: list[int], probs: Float[Tensor, "T V"] | None, verifier: Verifier
) -> tuple[Draft, Int[Tensor, "B N"]]:
    """The chains of all requests, and which of the processed rows is that of each node; those of padding are some row."""
    B = len(counts)
    N = max(counts) + 1
    T = sum(counts)
    tokens = np.zeros((B, N), np.int64)
    parents = np.full((B, N), -1)
    drawn = np.full((B, N), -1)
    rows = torch.zeros(B, N, dtype=torch.int64)
    distributions = torch.zeros(B, N - 1, dtype=torch.int64)
    start = 0
    ids = drafted.tolist()
    for b, count in enumerate(counts):
        tokens[b, 1 : count + 1] = ids[start : start + count]
        parents[b, 1 : count + 1] = np.arange(count)
        drawn[b, 1 : count + 1] = np.arange(count)
        rows[b, :count] = distributions[b, :count] = torch.arange(start, start + count)
        rows[b, count] = T + b
        start += count
    tree = TokenTree(tokens, parents)
    if probs is None or DraftSampling.IID not in verifier.info.draft_sampling or N == 1:
        return Draft(tree, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, np.full((B, N), -1)), rows
    q = probs[distributions.to(probs.device)].contiguous()
    return Draft(tree, DraftSampling.IID, TreeShape.CHAIN, out(q), drawn), rows


class Racing(torch.nn.Module):
    """The last step of vLLM's sampler, for forward passes without drafts: the same races, so that drafts do not change what a seed gives."""

    def __init__(self, runner: Any, verifier: Verifier) -> None:
        super().__init__()
        self.runner = runner
        self.verifier = verifier
        self.replaced = runner.sampler.topk_topp_sampler

    def forward(
        self,
        logits: Float[Tensor, "B V"],
        generators: Mapping[int, torch.Generator],
        k: Int[Tensor, " B"] | None,
        p: Float[Tensor, " B"] | None,
    ) -> tuple[Int[Tensor, " B"], Tensor | None]:
        """Tokens of each row, and what vLLM returns of the logits they were drawn from."""
        logits = apply_top_k_top_p(logits, k, p)
        roots = Draft.bare(np.zeros(len(logits), np.int64))
        key = _keys(self.runner, generators, len(logits), seeded=True)
        tokens = [emitted[0] for emitted in _decide(self.verifier, roots, logits[:, None], key)]
        mode = self.replaced.logprobs_mode
        source = {
            "processed_logits": lambda: logits,
            "processed_logprobs": lambda: logits.log_softmax(-1),
        }.get(mode)
        return torch.tensor(tokens, device=logits.device), None if source is None else source()
