"""What becomes of each field of other servers' and clients' requests: the tables of docs/reference/fields.md, and all of it as a file."""

import csv
import io
from collections.abc import Iterable

from polydraft.server.app import POSTS
from polydraft.server.bodies import Requested
from polydraft.server.fields import FIELDS, refusal, why_ignored
from polydraft.server.messages import OutputConfig
from polydraft.server.ollama import Options
from polydraft.server.protocol import ThinkingSwitch
from polydraft.server.responses import OutputText, Reasoning
from polydraft.server.sampled import StreamOptions, WantedForm

BODIES = {
    kind.group: (paths.split()[0], kind) for paths, _, kind in reversed(POSTS) if issubclass(kind, Requested)
}
BODIES |= {
    "stream_options": ("`stream_options`", StreamOptions),
    "structured_outputs": ("`structured_outputs`", WantedForm),
    "reasoning": ("`reasoning` of /v1/responses", Reasoning),
    "text": ("`text` of /v1/responses", OutputText),
    "output_config": ("`output_config` of /v1/messages", OutputConfig),
    "thinking": ("`thinking` of /v1/messages", ThinkingSwitch),
    "options": ("`options` of Ollama's paths", Options),
}
BODIES |= {"input_tokens": ("/v1/responses/input_tokens", BODIES["responses"][1])}


def fate(group: str, name: str) -> tuple[str, str]:
    """Whether a field is served, refused or ignored, and why.

    Example:
        >>> fate("completions", "use_beam_search"), fate("options", "top_k")
        (('refused', 'There is no beam search. Use n for several samples.'), ('served', ''))
    """
    if name in BODIES[group][1]._names():
        return "served", ""
    refused = refusal(group, name)
    return ("ignored", why_ignored(group, name) or "") if refused is None else ("refused", refused.reason)


def names_of(group: str) -> list[str]:
    return sorted({name for names in FIELDS[group].values() for name in names.split()})


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def by_reason(wanted: str) -> str:
    """Fields with one fate, by what is said of them."""
    reasons = dict[str, set[str]]()
    for group in FIELDS:
        for name in names_of(group):
            found, reason = fate(group, name)
            if found == wanted:
                reasons.setdefault(reason, set()).add(name)
    rows = [f"| {listed(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(["| fields | why |", "|---|---|", *sorted(rows)])


def csv_text() -> str:
    """Each field of each server."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(["path", "server", "field", "fate", "reason"])
    for group, servers in FIELDS.items():
        for server, names in servers.items():
            table.writerows(
                [BODIES[group][0].replace("`", ""), server, name, *fate(group, name)]
                for name in sorted({*names.split()})
            )
    return written.getvalue()
