"""From what an engine is asked for to its drafter, its rule and its policy."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from polydraft import registry, tree
from polydraft.core import Budget, Decoding, Drafter, EncoderDecoder, NamedDecoding, SecondSequenceDecoding, Target, Verifier
from polydraft.drafters.base import Asynchronous, Parts
from polydraft.drafters.choice import Choice
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import IncompatibleError, InvalidInputError, unknown_name
from polydraft.heads.checkpoint import kind_of, shipped
from polydraft.models.compiled.draft_vocabulary import FIRST_TOKENS
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.fixed import FixedPolicy, Policy, check_room
from polydraft.policy.profile import Profile
from polydraft.policy.switch import ChoicePolicy
from polydraft.verifiers import pairing

AHEAD = {
    "auto": "amusd",
    "model": "amusd",
    "model:chain": "amusd",
    "model:coupled": "amusd:coupled",
    "amusd": "amusd",
    "amusd:chain": "amusd",
    "amusd:coupled": "amusd:coupled",
}
"""By the drafter that is asked for, the one that drafts the same asynchronously."""


def limit_draft_vocabulary(draft_model: Target, tokenizer: Any, wanted: int | None) -> None:
    """Let a draft model compute logits of a part of its vocabulary, see `models.compiled.draft_vocabulary`.

    wanted: number of first tokens; 0: the whole vocabulary; None: the default, where the model covers it.

    Raises:
        IncompatibleError: a number, for a model that runs through torch.
    """
    if wanted == 0:
        return
    if isinstance(draft_model, CompiledLlama):
        draft_model.draft_over(FIRST_TOKENS if wanted is None else wanted, getattr(tokenizer, "all_special_ids", ()))
    elif wanted is not None:
        raise IncompatibleError(
            f"draft_vocabulary={wanted} was given for a draft model of type {type(draft_model).__name__}; expected a compiled one. Leave it out."
        )


def check_encoders(parts: Parts) -> None:
    """Refuse a draft model or a decoding method that reads other texts than the target.

    Raises:
        IncompatibleError: one of them is an encoder-decoder and the other is not; vocabularies or decoding methods that are for causal models only.
    """
    ours = isinstance(parts.target, EncoderDecoder)
    if parts.draft_model is not None and isinstance(parts.draft_model, EncoderDecoder) != ours:
        raise IncompatibleError(
            "one of target and draft model is an encoder-decoder and the other a causal model; expected two of one kind, as both read the "
            "same texts. Use a smaller model of the target's kind, or drafter='ngram'."
        )
    if ours and (parts.draft_tokenizer is not None and parts.draft_tokenizer.get_vocab() != parts.tokenizer.get_vocab()):
        raise IncompatibleError(
            "an encoder-decoder was given with a draft model of another vocabulary, which could not read its source. Use one of the same vocabulary."
        )
    if ours and isinstance(parts.decoding, SecondSequenceDecoding):
        raise IncompatibleError(
            f"the decoding method {type(parts.decoding).__name__} reads a second sequence, which an encoder-decoder does not have. Leave it out."
        )


def drafter(wanted: str | Drafter | Seq[str] | None, parts: Parts, options: Mapping[str, Any]) -> Drafter | None:
    """By name, by several names to choose from, or as it is; None decodes plainly.

    Raises:
        InvalidInputError: neither a name, names, nor a drafter.
    """
    if wanted is None or wanted == "none":
        return None
    if isinstance(wanted, str):
        names: Seq[str] = [wanted] if wanted.startswith("mixture:") else wanted.split(",")  # a mixture's sources have commas too
    elif isinstance(wanted, Seq):
        names = wanted
    elif hasattr(wanted, "propose"):
        return wanted
    else:
        names = ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(
            f"drafter={wanted!r} was given; expected a name, several names, a `core.Drafter`, or None. `polydraft methods` lists names."
        )
    if len(names) > 1:
        arms: dict[str, Drafter] = {}
        for name in names:
            arms[name] = _kind_of(arms.values(), name) or _made(name, parts, options.get(name, {}))
        return Choice(arms)
    return _made(names[0], parts, options)


def has_own_vocabulary(drafter: object) -> bool:
    """Whether the drafter of this name has a draft model with a tokenizer of its own.

    Example:
        >>> has_own_vocabulary("tli"), has_own_vocabulary("model:chain"), has_own_vocabulary(None)
        (True, False, False)
    """
    name = drafter.partition(":")[0] if isinstance(drafter, str) else ""
    return name in registry.names("drafter") and registry.drafter(name).methods[0].own_vocabulary


def asynchronous(wanted: str | Drafter | Seq[str] | None, rule: str | Verifier) -> str:
    """The drafter that runs ahead, in place of the one that was asked for.

    Raises:
        IncompatibleError: one that cannot run ahead.
    """
    race = (rule if isinstance(rule, str) else rule.info.name) == "race"
    if isinstance(wanted, str) and wanted in AHEAD:
        return "amusd:coupled" if race and wanted in ("auto", "model") else AHEAD[wanted]
    raise IncompatibleError(
        f"asynchronous=True was given with drafter={wanted!r}; expected a draft model, which alone can run ahead of what is verified: "
        f"{', '.join(map(repr, AHEAD))}. Heads and drafters of text need the verified states or text first. Leave asynchronous out for them."
    )


def decoding(wanted: str | Decoding | None, parts: Parts, options: Mapping[str, Any]) -> Decoding | None:
    """By name, or as it is; None leaves the sampling parameters alone.

    Raises:
        InvalidInputError: options beside an object or without a decoding method.
    """
    if isinstance(wanted, str):
        return registry.build_decoding(wanted, parts, options)
    if options:
        raise InvalidInputError(
            f"decoding_options={dict(options)} were given beside decoding={wanted!r}; expected them with the name of a decoding method: {', '.join(registry.names('decoding'))}."
        )
    return wanted


def slots(decoding: str | Decoding | None) -> int:
    """How many of the target's slots a request takes: two where the decoding method reads the target after another prompt, too.

    Example:
        >>> slots(None), slots("contrastive"), slots("guidance")
        (1, 1, 2)
    """
    method = registry.decoding(decoding) if isinstance(decoding, str) else decoding
    return 2 if getattr(method, "second_model", method) is None and method is not None else 1


def others(names: Seq[str], source: Drafter | None, parts: Parts) -> dict[str, Drafter]:
    """Further drafters by name beside the first one; kinds of one model share its slots.

    Raises:
        InvalidInputError: several drafters in one, or one twice.
    """
    drafters: dict[str, Drafter] = {} if source is None else {source.info.name: source}
    for name in names:
        if "," in name or name in ("auto", "none", *drafters):
            raise InvalidInputError(
                f"offered={list(names)} was given; expected names of single drafters, each once, beside the engine's own. Leave out {name!r}."
            )
        drafters[name] = _kind_of(drafters.values(), name) or _made(name, parts, {})
    return {name: drafters[name] for name in names}


def _kind_of(made: Iterable[Drafter], named: str) -> Drafter | None:
    """A further kind of a model drafter that is there already: it shares the model and its slots."""
    name, _, kind = named.partition(":")
    model = next((d for d in made if isinstance(d, ModelDrafter) and d.info.name.partition(":")[0] == name), None)
    return None if model is None else model.sibling(kind or "paths")


def _made(named: str, parts: Parts, options: Mapping[str, Any]) -> Drafter:
    return registry.build_drafter(_auto(parts, options) if named == "auto" else named, parts, options)


def _auto(parts: Parts, options: Mapping[str, Any]) -> str:
    if isinstance(parts.decoding, NamedDecoding) and parts.decoding.info.drafter:
        return parts.decoding.info.drafter
    weights = options.get("weights")
    if weights is None and parts.draft_model is not None:
        return "model"
    weights = weights or shipped(parts.target)
    return "ngram" if weights is None else kind_of(weights)


def verifier(wanted: str | Verifier, source: Drafter | None) -> Verifier:
    """By name, "auto" for the best one that is exact for the drafter, or as it is.

    Raises:
        IncompatibleError: one that is not exact for the drafter.
        InvalidInputError: neither a name nor a rule.
    """
    rule: Verifier
    if isinstance(source, Choice) and wanted == "auto":
        rule = source.rule()
    elif isinstance(wanted, str):
        name = wanted if wanted != "auto" else "match" if source is None else pairing.best_for(source.info)
        rule = registry.verifier(name)
    elif isinstance(wanted, Verifier):
        rule = wanted
    else:
        raise InvalidInputError(
            f"verifier={wanted!r} was given; expected a name, 'auto' or a `core.Verifier`. `polydraft methods` lists names."
        )
    if source is not None:
        pairing.check_pair(source.info, rule.info)
    return rule


def policy(
    wanted: Policy | str | None,
    depth: int | None,
    num_paths: int | None,
    profile: str | Profile | None,
    source: Drafter | None,
    *,
    copying: bool = False,
) -> Policy:
    """Its policy; a drafter that chooses among several policies for each of them. copying: see `AdaptivePolicy`."""
    if isinstance(source, Choice):
        return _choice_policy(source, wanted, depth, num_paths, profile)
    fixed = depth is not None or num_paths is not None
    ahead = source.lead_cap if isinstance(source, Asynchronous) else None
    if ahead is not None and (profile is not None or wanted == "adaptive" or num_paths not in (None, 1)):
        raise InvalidInputError(
            f"policy={wanted!r}, profile={profile!r} and num_paths={num_paths!r} were given beside asynchronous drafting, which takes what waits of one path; "
            "expected at most a depth. Drop them."
        )
    if ahead is not None and wanted in (None, "fixed"):
        wanted, depth = "fixed", depth or ahead
    chosen = wanted if wanted is not None else "fixed" if fixed and profile is None else "adaptive"
    if chosen != "fixed" and fixed:
        raise InvalidInputError(
            f"depth={depth} and num_paths={num_paths} were given beside policy={wanted!r} and profile={profile!r}; "
            "a fixed size leaves nothing to decide. Drop one of them."
        )
    if chosen == "fixed":
        depth, num_paths = depth or 5, num_paths or 1
        check_room(depth * num_paths, f"depth={depth} and num_paths={num_paths}")
        return FixedPolicy(Budget.fixed(tree.paths(num_paths, depth)))
    if chosen == "adaptive":
        return AdaptivePolicy(Profile.load(profile) if isinstance(profile, str) else profile, copying=copying)
    if isinstance(chosen, str):
        raise unknown_name("policy", chosen, ("adaptive", "fixed"))
    if not hasattr(chosen, "budgets"):
        raise InvalidInputError(
            f"policy={chosen!r} was given; expected 'adaptive', 'fixed' or an object such as `FixedPolicy(Budget.fixed(tree.chain(4)))`."
        )
    return chosen


def _choice_policy(
    choice: Choice, policy: Policy | str | None, depth: int | None, num_paths: int | None, profile: str | Profile | None
) -> Policy:
    arguments = {"policy": policy, "depth": depth, "num_paths": num_paths, "profile": profile}
    if isinstance(policy, ChoicePolicy) or all(v in (None, "adaptive") for v in arguments.values()):
        return policy if isinstance(policy, ChoicePolicy) else ChoicePolicy(choice)
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
    raise InvalidInputError(
        f"{shown} was given with drafters {choice.names}; expected none of these, as the policy chooses between the drafters. "
        "Drop it, or name one drafter."
    )
