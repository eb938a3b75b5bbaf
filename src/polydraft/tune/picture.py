"""The picture of `polydraft tune`: speed over depth, as predicted and as measured."""

from pathlib import Path

from matplotlib import pyplot as plt

from polydraft.tune.advice import Tuning, predicted


def picture(tuning: Tuning, path: Path) -> None:
    """Tokens per second over depth, a line for each number of paths as predicted, dots as measured; plain and adaptive level."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for w in range(1, tuning.max_width + 1):
        depths = range(13)
        rates = [predicted(tuning.profile, w, d, context=tuning.context) for d in depths]
        (line,) = axes.plot(depths, rates, label=f"{w} path{'s' if w > 1 else ''}, predicted")
        dots = [(t.size[1], t.measured) for t in tuning.trials if t.size is not None and t.size[0] == w]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=line.get_color(), label=f"{w} path{'s' if w > 1 else ''}, measured")
    for name, style in (("plain", ":"), ("adaptive", "--")):
        axes.axhline(tuning.trial(name).measured, color="black", linestyle=style, label=f"{name}, measured")
    axes.set_xlabel("depth: drafted tokens on a path")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
