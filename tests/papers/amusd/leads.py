"""Both workers' events in any order, over tables: every outcome of a small case with its probability, by the real `Lead` and the real rules."""

from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.methods import registry
from polydraft.papers.amusd.lead import Item, Lead
from polydraft.sampling import noise
from polydraft.testing import Tables

ROOT = 0
"""The prompt, whose distributions are those of the empty path."""


def cache_by_tables(f):
    """Remembers results for one set of tables at a time."""
    known = {}
    of = [None]

    def call(tables, *key):
        if of[0] is not tables:
            of[0] = tables
            known.clear()
        if key not in known:
            known[key] = f(tables, *key)
        return known[key]

    return call


class Quarters(Tables):
    """Draft rows of quarters, so that a uniform of four values draws from them exactly."""

    def _row(self, which, path):
        row = super()._row(which, path)
        if which == "p":
            return row
        first = min(3, max(1, round(4 * row[0]))) / 4
        return np.array([first, 1 - first])


@cache_by_tables
def verdict(tables, rule, path, tokens, rows):
    """((probability, emitted tokens, accepted), ...) of a pass behind `path` over a chain drawn from q at `rows`."""
    chain = TokenTree.chain(np.array([[ROOT, *tokens]]))
    q = np.array(np.array([[tables.row("q", row) for row in rows] or [tables.row("q", path)]]))
    index = np.array([[-1, *range(len(tokens))]])
    p = np.array(np.array([[tables.row("p", (*path, *tokens[:n])) for n in range(len(tokens) + 1)]]))
    given = registry.verifier(rule)(Draft(chain, DraftSampling.IID, TreeShape.CHAIN, q, index), p)
    found = []
    for n, stop in enumerate(given.stop[0].tolist()):
        if stop > 0:
            after = given.after(np.array([n]))[0].tolist()
            found += [(stop * x, (*tokens[:n], y), n) for y, x in enumerate(after) if x > 0]
    return tuple(found)


class Worker:
    """How the draft worker draws; the wrong variants differ here.

    drawn(world, step, text): the context that it draws from; reported: the one whose row it says.  publishes: whether a drawn token is kept.
    """

    def drawn(self, world, step, text):
        return text

    def reported(self, world, step, text):
        return text

    def publishes(self, token, row):
        return True

    position_noise = False


@dataclass
class World:
    """One state of both workers. seen: uniforms of places, where noise is keyed by them; own: the worker's own text, for wrong variants."""

    lead: Lead
    drafting: tuple | None = None
    verifying: tuple | None = None
    seen: tuple = ()
    own: tuple = ()

    @property
    def key(self):
        x = self.lead
        return (
            tuple(x.text),
            tuple(x.ring),
            x.epoch,
            x.acknowledged,
            x.start,
            x.taken,
            self.drafting,
            self.verifying,
            self.seen,
            self.own,
        )

    @property
    def path(self):
        return tuple(self.lead.text[1:])

    def forked(self, **changes):
        lead = copy(self.lead)
        lead.text = list(lead.text)
        lead.ring = lead.ring.copy()
        lead.counts = copy(lead.counts)
        return replace(self, lead=lead, **changes)


@dataclass(eq=False)
class Case:
    """What is run. draw: None to branch over all tokens, else (path, place) -> the token.  judge likewise: (path, items) -> (tokens, accepted)."""

    tables: Tables
    rule: str = "speculative"
    cap: int = 3
    depth: int = 2
    worker: Worker = field(default_factory=Worker)
    lead: type = Lead
    draw: object = None
    judge: object = None
    ends: tuple = ()

    def begin(self):
        return {(): (World(self.lead([ROOT], self.cap, self.ends)), 1.0)}

    def drafts(self, world):
        """The worker's next event: [(world, probability)]; empty where it has nothing to do."""
        if world.drafting is None:
            new = world.forked()
            step = new.lead.next()
            if step is None:
                return []
            new.lead.acknowledge(step.epoch)
            text = tuple(new.lead.before(step)[1:])
            new.drafting = step, text
            return [(new, 1.0)]
        step, text = world.drafting
        context = self.worker.drawn(world, step, text)
        said = self.worker.reported(world, step, text)
        if self.draw is not None:
            options = [(1.0, self.draw(context, step.place), world.seen)]
        elif self.worker.position_noise:
            options = []
            known = dict(world.seen)
            for u in [known[step.place]] if step.place in known else range(4):
                seen = tuple(sorted((known | {step.place: u}).items()))
                options.append(
                    (
                        1.0 if step.place in known else 0.25,
                        int(u / 4 >= self.tables.row("q", context)[0]),
                        seen,
                    )
                )
        else:
            options = [(w, x, world.seen) for x, w in enumerate(self.tables.row("q", context)) if w > 0]
        found = []
        for weight, token, seen in options:
            new = world.forked(drafting=None, seen=seen, own=(*context, token))
            if self.worker.publishes(token, self.tables.row("q", context)):
                new.lead.publish([Item(token, said, step.epoch, step.place)])
            assert len(new.lead.ring) <= self.cap, "a lead beyond its cap"
            found.append((new, weight))
        return found

    def verifies(self, world):
        """The verify worker's next event."""
        if world.verifying is None:
            new = world.forked()
            new.verifying = tuple(new.lead.take(self.depth))
            return [(new, 1.0)]
        items = world.verifying
        if self.judge is not None:
            options = [(1.0, *self.judge(world.path, items))]
        else:
            options = verdict(
                self.tables, self.rule, world.path, tuple(i.token for i in items), tuple(i.row for i in items)
            )
        found = []
        for weight, tokens, accepted in options:
            new = world.forked(verifying=None)
            new.lead.verified(tokens, accepted)
            found.append((new, weight))
        return found


def after(case, worlds, event):
    """All worlds after one event, equal ones as one; "d" of the draft worker, "v" of the verify worker, or a function world -> either."""
    found = {}
    for world, weight in worlds.values():
        what = event(world) if callable(event) else event
        for new, chance in (case.drafts if what == "d" else case.verifies)(world) or [(world, 1.0)]:
            _, before = found.get(new.key, (None, 0.0))
            found[new.key] = new, before + weight * chance
    return found


def distribution(case, worlds, length):
    """Distribution of the first tokens, those that are missing drawn from p: [V] * length, flat."""
    V = case.tables.V
    found = {}

    def extend(path, weight):
        if len(path) >= length:
            found[path[:length]] = found.get(path[:length], 0.0) + weight
            return
        for x, p in enumerate(case.tables.row("p", path)):
            if p > 0:
                extend((*path, x), weight * p)

    for world, weight in worlds.values():
        extend(world.path, weight)
    return np.array([found.get(path, 0.0) for path in np.ndindex(*[V] * length)])


def target_distribution(tables, length):
    return distribution(Case(tables), Case(tables).begin(), length)


def orders(case, length, worlds=None, most=None):
    """The worlds after every order of so many events."""
    worlds = case.begin() if worlds is None else worlds
    most = length if most is None else most
    if most == 0:
        yield worlds
        return
    for event in "dv":
        if event == "v" or any(case.drafts(world) for world, _ in worlds.values()):
            yield from orders(case, length, after(case, worlds, event), most - 1)


def race_case(tables, seed, **options):
    """Draft and target draw with the same clocks, by the rule `race`."""

    @cache
    def winner(which, path, place):
        clocks = noise.clocks(NoiseKey.of([seed], [0], [place]), tables.V)[0]
        with np.errstate(divide="ignore"):
            return int(np.argmin(clocks / tables.row(which, path)))

    def judge(path, items):
        tokens = tuple(i.token for i in items)
        p = np.array(np.array([[tables.row("p", (*path, *tokens[:n])) for n in range(len(tokens) + 1)]]))
        q = np.array(np.array([[tables.row("q", i.row) for i in items] or [tables.row("q", path)]]))
        key = NoiseKey.of([seed], [0], [1 + len(path)])
        chain = TokenTree.chain(np.array([[ROOT, *tokens]]))
        rows = np.array([[-1, *range(len(tokens))]])
        outcome = registry.verifier("race")(
            Draft(chain, DraftSampling.COUPLED, TreeShape.CHAIN, q, rows, key), p
        ).sample(key)
        return tuple(outcome.emitted(chain)[0]), int(outcome.num_accepted[0])

    def plain(length):
        path = ()
        while len(path) < length:
            path = (*path, winner("p", path, 1 + len(path)))
        return path

    return Case(
        tables, draw=lambda path, place: winner("q", path, place), judge=cache(judge), **options
    ), plain


def reachable(case, length):
    """Every state that any order of events reaches, until the text has so many tokens."""
    open_ = list(case.begin().values())
    known = {}
    while open_:
        world, _ = open_.pop()
        if world.key in known:
            continue
        known[world.key] = world
        if len(world.path) < length:
            open_ += case.drafts(world) + case.verifies(world)
    return list(known.values())
