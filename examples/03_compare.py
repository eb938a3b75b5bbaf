"""Two ways of drafting and plain decoding on the same prompts, interleaved, as `polydraft demo` does it."""

import torch

from polydraft import Engine
from polydraft.bench.compare import engine_contender, measure
from polydraft.models import pair

torch.set_num_threads(1)  # two threads wait for each other on a busy machine

ways = {
    "plain": {"drafter": None},
    "prompt lookup": {"drafter": "ngram", "depth": 5},
    "chain + block": {"drafter": "model:chain", "verifier": "block", "depth": 5},
    "two paths + GTV": {"drafter": "model", "verifier": "greedy_traversal", "depth": 4, "num_paths": 2},
}
engines = {name: Engine.embedded(max_num_seqs=1, **how) for name, how in ways.items()}
contenders = [engine_contender(name, engine, temperature=1.0) for name, engine in engines.items()]
prompts = [engines["plain"].encode(prompt.text) for prompt in pair.prompts()[:3]]

measure(contenders, prompts[:1], max_tokens=8, repetitions=1)  # compiles
plain, *others = measure(contenders, prompts, max_tokens=48, repetitions=2)
print(f"{plain.contender.name}: {plain.tokens_per_second:.0f} tokens/s")
for found in others:
    print(
        f"{found.contender.name}: {found.tokens_per_second:.0f} tokens/s, {found.speedup_over(plain).ratio:.2f}x, "
        f"{found.tokens_per_step:.2f} tokens per step, accepted by depth {[round(a, 2) for a in found.acceptance_by_depth]}"
    )

# plain: 82 tokens/s
# prompt lookup: 71 tokens/s, 0.89x, 1.13 tokens per step, accepted by depth [0.19, 0.08, 0.05, 0.04, 0.03]
# chain + block: 98 tokens/s, 1.21x, 2.69 tokens per step, accepted by depth [0.61, 0.46, 0.28, 0.24, 0.19]
# two paths + GTV: 99 tokens/s, 1.22x, 2.62 tokens per step, accepted by depth [0.71, 0.47, 0.31, 0.22]
