"""Write the pair as Hugging Face folders in bfloat16, with held-out prompts and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from polydraft.bench.record import markdown_table
from studies.embedded_pair.corpus import Corpus, Document

SHORT_PROMPTS = (
    "argparse.py", "heapq.py", "textwrap.py", "shutil.py", "json/decoder.py", "graphlib.py", "rich/table.py",
    "networkx/algorithms/dag.py",
)  # fmt: skip
LONG_PROMPTS = ("heapq.py", "shutil.py", "jinja2/lexer.py")
SHORT_TOKENS = 130
LONG_TOKENS = 500


def export_model(model: Any, tokenizer_folder: Path, folder: Path) -> None:
    """Save a LlamaForCausalLM in bfloat16 beside its tokenizer; the model itself is left rounded to bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)


def beginning(text: str, num_tokens: int, tokenizer: Any) -> str:
    """The longest run of whole first lines within `num_tokens` tokens."""
    kept = ""
    for line in text.splitlines(keepends=True):
        if len(tokenizer(kept + line, add_special_tokens=False).input_ids) > num_tokens:
            break
        kept += line
    return kept.rstrip("\n") + "\n"


def export_prompts(corpus: Corpus, tokenizer_folder: Path, folder: Path) -> None:
    """Write prompts.jsonl: beginnings of held-out modules, each with its source and licence."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents = {d.path: d for d in corpus.held_out}
    packages = {p.name: p for p in corpus.packages}

    def prompt(document: Document, suffix: str, num_tokens: int) -> dict[str, str]:
        package = packages[document.package]
        stem = document.path.removesuffix(".py").split("/")[-1]
        text = beginning(document.text, num_tokens, tokenizer)
        source = f"{package.name} {package.version}, {document.path}"
        return {"name": stem + suffix, "text": text, "source": source, "licence": package.licence}

    chosen = [prompt(documents[path], "", SHORT_TOKENS) for path in SHORT_PROMPTS]
    chosen += [prompt(documents[path], "-long", LONG_TOKENS) for path in LONG_PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in chosen), encoding="utf-8")


def model_card(record: dict[str, Any]) -> str:
    """The README of the pair, from the figures that `evaluate` wrote."""
    h = record["held_out"]
    t = record["target"]
    d = record["draft"]
    losses = markdown_table(
        ("held out", "nats per token", "bits per byte"),
        [
            (m, f"{h[f'{m}_nats_per_token']:.3f}", f"{h[f'{m}_bits_per_byte']:.3f}")
            for m in ("target", "draft", "trigram")
        ],
    )
    shapes = markdown_table(
        ("", "parameters", "hidden", "layers", "heads (KV)", "intermediate", "training tokens"),
        [
            (n, f"{r['num_parameters']:,}", *r["shape"], f"{r['num_tokens']:,}")
            for n, r in (("target", t), ("draft", d))
        ],
    )
    packages = markdown_table(
        ("package", "version", "licence"),
        [(p["name"], p["version"], p["licence"]) for p in record["packages"]],
    )
    commands = "\n".join(record["commands"])
    held_out = ", ".join(f"`{name}`" for name in record["held_out_modules"])
    return f"""# The embedded pair

Two Llama-architecture models with one tokenizer (byte-level BPE, V = 2048, tied embeddings, context 1,024), trained from random
weights on Python source. They exist so that every algorithm of this library can be run and measured offline on real distributions: they
continue Python-looking text and know nothing else.

{shapes}

The draft's last {d["num_distillation_tokens"]:,} tokens were distillation on the target's distributions, {d["share_generated"]:.0%} of
them on text that the target generated.

## Held-out figures

Measured after rounding to bfloat16, computed in float32, on {h["num_tokens"]:,} tokens ({h["num_bytes"]:,} bytes) of modules held
out whole. `trigram` is an interpolated modified Kneser-Ney table counted on exactly the tokens that the target saw, its discounts
tuned on the held-out text.

{losses}

Acceptance (mean of `sum_v min(p(v), q(v))` at temperature 1): **{h["acceptance"]:.3f}**.
Top-1 agreement: {h["top1_agreement"]:.3f}.

Held out: {held_out}.
A file that shares ten or more windows of three code lines with any of them was left out of the training part.

## Training

```
{commands}
```

Seed {record["seed"]}, torch {record["torch"]}, one CPU thread, float32. Corpus hash (SHA-256):
`{record["corpus_hash"]}`.
The hash depends on the installed versions below; other versions give another corpus and other weights.

## Corpus and licences

The training text is the source of these packages as installed, without tests, generated tables and vendored copies; no other
text was used. The prompts in `prompts/` are verbatim beginnings of held-out modules under the licences stated there.

{packages}

## Limits

- 5M and 0.6M parameters: the text looks like Python and is not correct Python. Not for use as a coding assistant.
- Trained mostly on rows of 256 and 512 tokens, at the end on rows of 1,024; there is no context beyond 1,024.
- Acceptance depends on the text: the figure above is for real Python source at temperature 1.
"""
