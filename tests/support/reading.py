"""How many tokens of new texts each pass of a model reads."""


def read_counts(model, monkeypatch):
    """Tokens that `prefill` and `score_mixed` are given from now on, by call."""
    counts = []
    prefill = model.prefill

    def reads(slots, token_ids, **options):
        counts.append(sum(map(len, token_ids)))
        return prefill(slots, token_ids, **options)

    monkeypatch.setattr(model, "prefill", reads)
    if hasattr(model, "score_mixed"):
        score_mixed = model.score_mixed

        def reads_beside(slots, tree, pieces, **options):
            counts.append(sum(map(len, pieces.values())))
            return score_mixed(slots, tree, pieces, **options)

        monkeypatch.setattr(model, "score_mixed", reads_beside)
    return counts
