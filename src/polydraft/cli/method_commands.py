"""A command for each method: one that runs as printed, on the pair of small models inside the package, or with what it needs in its capitals."""

from typing import TYPE_CHECKING, NamedTuple

from polydraft.methods import registry

if TYPE_CHECKING:
    from polydraft.core import Method

EXAMPLE = 'polydraft generate "def f(x):" --model embedded --max-tokens 16'
ANY_MODEL = 'polydraft generate "Once upon a time" --model MODEL'
ON_THE_EMBEDDED_PAIR = (
    "model",
    "model:chain",
    "model:systematic",
    "model:listed",
    "model:without_replacement",
    "model:greedy_plus_one",
    "ngram",
    "amusd",
)
"""Drafters that need no more, in the order in which one is taken for a verifier."""


class ShellCommand(NamedTuple):
    """text: a line for a shell, "" where there is none.  needs: what its words in capitals stand for, "" where it runs as it is."""

    text: str
    needs: str = ""


def of_verifier(info: "Method") -> ShellCommand:
    """With a drafter that it is exact for.

    Example:
        >>> of_verifier(registry.verifier("flow").info).text.partition("16 ")[2]
        '--drafter model:systematic --verifier flow'
    """
    from polydraft.verifiers import pairing

    if info.name not in registry.names("verifier"):
        return ShellCommand(
            "polydraft images --help", "a verifier that is made for one model's data, by its module"
        )
    drafters = (*ON_THE_EMBEDDED_PAIR, *registry.names("drafter"))
    drafter = next(
        name
        for name in drafters
        if (drawn := registry.declared(name)) is not None and pairing.accepts(info, drawn)
    )
    command = of_drafter(drafter)
    return ShellCommand(f"{command.text} --verifier {info.name}", command.needs)


def of_drafter(name: str) -> ShellCommand:
    """By what it is built from.

    Example:
        >>> of_drafter("suffix").text.endswith("--drafter suffix"), of_drafter("eagle").needs
        (True, 'FOLDER: a head, `polydraft train eagle --model MODEL --out FOLDER`, or OWNER/NAME of a published one')
    """
    base = registry.name_and_kind(name)[0]
    kind = base.partition(":")[0]
    if kind in registry.heads() and kind in registry.names("recipe"):
        trained = f"`polydraft train {kind} --model MODEL --out FOLDER`"
        return ShellCommand(
            f"{ANY_MODEL} --head FOLDER --drafter {name}",
            f"FOLDER: a head, {trained}, or OWNER/NAME of a published one",
        )
    if kind in registry.heads():
        return ShellCommand(
            f"{ANY_MODEL} --head OWNER/NAME --drafter {name}", "OWNER/NAME: a published head of MODEL"
        )
    if registry.takes(base, "weights"):
        return ShellCommand(
            f"{ANY_MODEL} --head FOLDER --drafter {name}", "FOLDER: a network that was trained for MODEL"
        )
    if registry.takes(base, "index"):
        return ShellCommand(
            f"{EXAMPLE} --drafter {name} --index FILE",
            "FILE: `polydraft index build --tokenizer embedded --out FILE TEXTS`",
        )
    if name in registry.names("decoding"):  # whose passages it drafts from
        return of_decoding(name)
    if registry.takes(base, "models"):
        return ShellCommand(
            f"{ANY_MODEL} --draft-model A --draft-model B",
            "A, B: smaller models with the vocabulary of MODEL",
        )
    return ShellCommand(f"{EXAMPLE} --drafter {name}")


def of_decoding(name: str) -> ShellCommand:
    """By the options that the method takes."""
    if "passages" in registry.decoding_options(name):
        return ShellCommand(
            f"{ANY_MODEL} --decoding {name} --decoding-option passages=FILE",
            "FILE: `polydraft index build --kind passages --model MODEL --out FILE TEXTS`",
        )
    return ShellCommand(f"{EXAMPLE} --decoding {name}")
