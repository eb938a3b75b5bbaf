"""What a picture calls a way of drafting and verifying, for readers who do not know the names of options."""

DRAFTERS = {
    "plain": "without drafts",
    "model": "draft model",
    "ngram": "n-gram lookup",
    "suffix": "suffix decoding",
    "trigram": "trigram table",
    "eagle": "EAGLE-3 head",
    "medusa": "Medusa heads",
    "mtp": "multi-token prediction",
    "several": "several draft models",
}
VARIANTS = {
    "coupled": "shared noise",
    "without_replacement": "distinct tokens",
    "greedy_plus_one": "top tokens and a sampled one",
    "top_k": "likeliest tree",
}
VERIFIERS = {
    "block": "block verification",
    "store": "with a store",
    "match": "exact match",
    "race": "seed-exact race",
    "recursive": "recursive rejection",
    "speculative": "speculative sampling",
}
PEERS = ("transformers", "llama.cpp", "vLLM")


def _shape(size: str) -> str:
    paths, _, depth = size.partition("x")
    return f"chain of {depth}" if paths == "1" else f"{paths} paths of {depth}"


def label(way: str) -> str:
    """A way of `polydraft bench` in words; two lines where it names a verifier.

    Example:
        >>> label("model:chain+block@1x4")
        'draft model, chain of 4,\\nblock verification'
        >>> label("ngram"), label("model+greedy_traversal@2x4")
        ('n-gram lookup', 'draft model, 2 paths of 4,\\ngreedy traversal')
    """
    if way.startswith(PEERS):
        return way
    names, _, size = way.partition("@")
    drafter, _, verifier = names.partition("+")
    source, _, variant = drafter.partition(":")
    if source not in DRAFTERS:
        return way
    words = [DRAFTERS[source]]
    if variant and variant != "chain":
        words.append(VARIANTS.get(variant, variant.replace("_", " ")))
    if size:
        words.append(_shape(size))
    text = ", ".join(words)
    rule = VERIFIERS.get(verifier, verifier.replace("_", " "))
    return f"{text},\n{rule}" if rule and size else f"{text} {rule}".strip()
