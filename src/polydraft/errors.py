"""One family of exceptions. Every message says what was given, what was expected and what to do."""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from os.path import dirname

_OURS = dirname(__file__)
_PYTHON = dirname(traceback.__file__)


class PolydraftError(Exception):
    """Base of all errors that polydraft raises on purpose; catch it to catch them all."""


class InvalidInputError(PolydraftError, ValueError):
    """A value that the caller gave is outside what is allowed."""


class GrammarError(InvalidInputError):
    """A grammar that cannot be followed any further in the middle of an output."""


class IncompatibleError(PolydraftError, ValueError):
    """Two things that do not fit were joined: a drafter and a verifier, or two vocabularies."""


class UnknownNameError(PolydraftError, LookupError):
    """A method or option that does not exist."""


class ModelLoadError(PolydraftError, OSError):
    """A model folder that is missing, incomplete, corrupt or of an unsupported kind."""


class CapacityError(PolydraftError, RuntimeError):
    """More memory, slots or context than there is."""


class BusyError(CapacityError):
    """As many requests wait as may: ask again later."""


class ClosedError(BusyError):
    """The engine takes no more requests: ask another one, or this one when it runs again."""


class DraftWorkerError(PolydraftError, RuntimeError):
    """The worker that drafts while the target verifies has died, or is in another process."""


class RankError(PolydraftError, RuntimeError):
    """A process that holds a part of the target has died, hangs, or could not begin."""


class DrafterWarning(UserWarning):
    """A drafter failed and was switched off for a request; its text is unharmed."""


class PrefixWarning(UserWarning):
    """A file of a prefix cache is not used; prompts are read."""


class RequestWarning(UserWarning):
    """A request ended with an error; what it had emitted stays, and other requests are unharmed."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not registered, with the nearest known one as advice.

    Example:
        >>> str(unknown_name("verifier", "blok", ["block", "match"]))
        "unknown verifier 'blok'; did you mean 'block'? Known: block, match"
    """
    names = sorted(known)
    nearest = get_close_matches(given, names, n=1, cutoff=0.5)
    advice = f"did you mean {nearest[0]!r}? " if nearest else ""
    return UnknownNameError(f"unknown {kind} {given!r}; {advice}Known: {', '.join(names)}")


def too_long(length: int, longest: int) -> CapacityError:
    """The error for a prompt of so many tokens and a context of so many.

    Example:
        >>> str(too_long(9, 8))
        'a prompt of 9 tokens was given; the context holds 8, so it may have at most 7. Shorten it.'
    """
    return CapacityError(
        f"a prompt of {length} tokens was given; the context holds {longest}, so it may have at most {longest - 1}. Shorten it."
    )


def no_template(model: str) -> IncompatibleError:
    """The error for a chat with a model whose tokenizer has no chat template.

    Example:
        >>> str(no_template("base")).partition(":")[0]
        "the tokenizer of 'base' has no chat template"
    """
    return IncompatibleError(
        f"the tokenizer of {model!r} has no chat template: the model was not trained to converse. "
        "Use a chat model, give the engine's tokenizer a chat_template, or use generate."
    )


def first_line(error: BaseException) -> str:
    """What an error says, or its name.

    Example:
        >>> first_line(ValueError("no such file.\\nmore")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def place(error: BaseException) -> str:
    """File and line where an error was raised: the innermost that is neither ours nor of an installed package or Python, else the innermost of ours.

    Example:
        >>> try:
        ...     1 / 0
        ... except ZeroDivisionError as error:
        ...     place(error)
        '<doctest polydraft.errors.place[0]>:2'
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = ("site-packages", _PYTHON)
    own_frames = [frame for frame in frames if not any(part in frame.filename for part in others)] or frames
    theirs = [frame for frame in own_frames if not frame.filename.startswith(_OURS)]
    innermost = (theirs or own_frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}" for frame in innermost)


def check_installed(asked: str, *packages: str, extra: str) -> None:
    """Refuse what needs packages that are not installed. asked: what was asked for, as the beginning of a sentence.  extra: that has them.

    Raises:
        IncompatibleError: naming what is missing, and how it is added.

    Example:
        >>> check_installed("a sum was asked for", "math", extra="torch")
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise IncompatibleError(
            f'{asked}, which needs {" and ".join(missing)}. pip install "polydraft[{extra}]" adds {"them" if len(missing) > 1 else "it"}.'
        )
