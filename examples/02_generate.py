"""The embedded pair continues a prompt: with drafts, with a fixed seed, and streamed with the origin of every token."""

from polydraft import Engine, SamplingParams

engine = Engine.embedded()  # or Engine.from_pretrained("path/to/target", draft_model="path/to/draft")

greedy = engine.generate("import os\nimport ", SamplingParams(temperature=0, max_tokens=12))[0]
print(repr(greedy.text))
print(f"{greedy.stats.generated_tokens} tokens in {greedy.stats.steps} forward passes of the target model")

# Seed-exact: the race gives the same tokens with and without drafts.
params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
drafted = Engine.embedded(verifier="race").generate("class Stack:\n", params)[0]
plain = Engine.embedded(verifier="race", drafter=None).generate("class Stack:\n", params)[0]
print("seed-exact:", drafted.token_ids == plain.token_ids)

# Streaming: each step gives the tokens that one forward pass of the target model accepted.
steps = engine.stream("def add(a, b):\n", SamplingParams(seed=1, max_tokens=24))
print(" | ".join(repr(step.text)[1:-1] for step in steps))

# 'errno\nimport os\nimport os\nimport os\n'
# 12 tokens in 6 forward passes of the target model
# seed-exact: True
#         """\n        p is |  the same ``b | , q = -cd(b | )`` |  in the turn
