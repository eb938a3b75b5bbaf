"""The picture of `polydraft tune`: speed of chains over their depth, as predicted and as measured."""

from pathlib import Path

from matplotlib import pyplot as plt

from polydraft.tune.tune import Tuning


def picture(tuning: Tuning, path: Path) -> None:
    """Tokens per second over depth; plain decoding and the adaptive policy level."""
    chains = [
        (t.budget.max_depth, tuning.predicted(t), t.measured)
        for t in tuning.trials
        if t.budget and t.budget.width == 1
    ]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if chains:
        depths, predicted, measured = zip(*chains, strict=True)
        axes.plot(depths, predicted, label="chains, predicted")
        axes.plot(depths, measured, "o", label="chains, measured")
    for name, label, style in (("plain", "without drafts", ":"), ("adaptive", "speculation policy", "--")):
        axes.axhline(tuning.trial(name).measured, color="black", linestyle=style, label=label)
    axes.set_xlabel("speculation length (draft tokens of a chain)")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
