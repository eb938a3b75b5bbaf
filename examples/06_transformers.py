"""Inside transformers: `generate` as you know it, with its decoding loop replaced."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import polydraft
from polydraft.models import pair

logging.disable_progress_bar()
folder = str(pair.target_folder())  # or any causal language model of transformers
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
fast = polydraft.custom_generate(
    draft_model=str(pair.draft_folder()), depth=4
)  # keep it: it keeps its caches

inputs = tokenizer("import os\nimport ", return_tensors="pt")
plain = model.generate(inputs["input_ids"], do_sample=False, max_new_tokens=16)
drafted = model.generate(inputs["input_ids"], do_sample=False, max_new_tokens=16, custom_generate=fast)
print("greedy, the same tokens:", torch.equal(plain, drafted))
print(f"{fast.stats[0].generated_tokens} tokens in {fast.stats[0].steps} forward passes")

# Processors, sampling parameters, several samples, scores: as always.
torch.manual_seed(0)
found = model.generate(
    inputs["input_ids"],
    do_sample=True,
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.1,
    num_return_sequences=2,
    max_new_tokens=12,
    return_dict_in_generate=True,
    output_scores=True,
    custom_generate=fast,
)
print("samples:", len(found.sequences), "steps with scores:", len(found.scores))

# greedy, the same tokens: True
# 16 tokens in 5 forward passes
# samples: 2 steps with scores: 12
