"""`polydraft check --url`: a server of others, or of ours, tested from outside."""

import json
import os
from typing import TYPE_CHECKING, Any

import typer

from polydraft.cli.files import read_lines
from polydraft.cli.options import MeasurementOptions
from polydraft.cli.progress import bars
from polydraft.cli.tables import grid, output
from polydraft.config import EngineConfig

if TYPE_CHECKING:
    from polydraft.check.audit import Audit


EXIT_STATUS = {"failed": 1, "inconclusive": 3}
WORST = 8
"""Tests and texts that are shown one by one."""


def audit_server(
    url: str,
    name: str | None,
    config: EngineConfig,
    measurement: MeasurementOptions,
    *,
    steps: int,
    seed: int,
    as_json: bool,
) -> None:
    """Test a server's texts, and end with the status of what was found."""
    from polydraft.check.audit import audit
    from polydraft.check.remote import Completions
    from polydraft.models import pair
    from polydraft.models.load import encode, load_tokenizer
    from polydraft.models.loading.folder import load_module
    from polydraft.models.slots import special_ids

    texts = (
        [p.text for p in pair.prompts()[:8]]
        if measurement.prompts is None
        else read_lines("--prompts", measurement.prompts)
    )
    tokenizer = load_tokenizer(str(config.model))
    server = Completions(url, tokenizer, name, os.environ.get("POLYDRAFT_API_KEY"))
    judge = load_module(str(config.model), dtype=config.dtype, device=config.device)
    with bars(f"asking {server.name} at {url}", hidden=as_json) as step:
        options: dict[str, Any] = {
            "temperature": measurement.temperature,
            "max_tokens": measurement.max_tokens,
            "tokens": steps,
        }
        prompts = [encode(tokenizer, text) for text in texts]
        end_ids = special_ids(judge)[0]
        report = audit(
            server,
            judge,
            prompts,
            eos_token_ids=end_ids,
            seed=seed,
            progress=lambda n, of: step(of, n),
            **options,
        )
    if as_json:
        typer.echo(json.dumps({"url": url, "model": server.name, **options, **report.to_dict()}))
    else:
        _show(report, server.name, measurement.temperature, tokenizer)
    if report.verdict[0] != "passed":
        raise typer.Exit(EXIT_STATUS[report.verdict[0]])


def _show(report: "Audit", name: str, temperature: float, tokenizer: Any) -> None:
    from polydraft.check.finding import POWER

    console = output(110)
    if report.findings:
        worst = sorted(report.findings, key=lambda f: (not f.what.startswith("all"), f.p_value))[:WORST]
        rows = [(f.what, str(f.count), f"{f.effect:.4f}", f"{f.p_value:.3g}") for f in worst]
        console.print(grid(("test", "tokens", "deviation", "p-value"), rows))
    for d in report.differences[:WORST]:
        token, best = (tokenizer.decode([token]) for token in (d.token, d.best))
        console.print(
            f"  text {d.text + 1} differs first at token {d.position}: {token!r}, {d.margin:.3f} logits below {best!r}",
            highlight=False,
        )
    status, reason = report.verdict
    power = (
        f"with probability {POWER:g} a deviation of {report.detectable:.2g} would have been found"
        if report.findings
        else f"{report.ties} near ties within {report.margin:.2g} logits"
    )
    guessed = f" Token ids of {report.guessed} texts were guessed." if report.guessed else ""
    console.print(
        f"\n{status if status == 'passed' else status.upper()}: {reason}. {name} at temperature {temperature:g}: {report.tokens} tokens of {report.texts} texts, "
        f"worst p-value {report.p_value:.3g} after correction for {max(len(report.findings), 1)} tests; {power}.{guessed}"
    )
    for what, (verdict, why) in (
        ("tokens", report.tokens_verdict),
        ("log-probabilities", report.logprobs_verdict),
    ):
        console.print(f"  {what:<17} {verdict}: {why}", highlight=False)
