"""`python -m studies.mutants`: small mistakes are made in the source, one at a time, and the tests that guard it are run.

A mutant that no test kills is a line that nothing guards, or one whose change nobody can see: a faster way, a message.
Mutants are drawn by seed from the syntax tree: comparisons, sums, conditions and numbers that change, calls that are left out.
Each runs in a copy of the package, so the checkout stays as it is; code that it changes is compiled anew there.
"""

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from studies.options import Out, Quick, append_rows, read_rows

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/polydraft")


class Subject(NamedTuple):
    """What is changed and what has to notice. files: below the package, all Python files of a folder.  tests: files and folders."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


SUBJECTS = {
    "recurrent memory": Subject(
        ("models/mixers/recurrent.py",),
        ("tests/models/test_recurrent.py", "tests/models/test_row_bits.py", "tests/models/test_hybrids.py"),
    ),
    "delta net": Subject(
        ("models/mixers/delta_net/code.py",),
        ("tests/models/test_delta_net.py", "tests/models/test_row_bits.py", "tests/models/test_hybrids.py"),
    ),
    "state space": Subject(
        ("models/mixers/state_space/code.py",),
        ("tests/models/test_row_bits.py", "tests/models/test_hybrids.py"),
    ),
    "experts": Subject(
        (
            "models/mixers/experts/parts.py",
            "models/mixers/experts/routing.py",
            "models/mixers/experts/block.py",
        ),
        ("tests/models/test_experts.py", "tests/models/test_mixtures.py"),
    ),
    "growing trees": Subject(
        ("heads/foretold.py", "models/growing/drawn.py", "models/growing/ranked.py"),
        ("tests/heads/test_one_pass.py", "tests/heads/test_dspark.py", "tests/drafters/test_own_path.py"),
    ),
    "cursors and readers": Subject(
        (
            "core/cursor.py",
            *(f"engine/{name}.py" for name in ("reader", "reading", "drafter_state", "drafting", "second")),
        ),
        (
            *(
                f"tests/engine/test_{name}.py"
                for name in ("reader", "reading_ahead", "prefixes", "neighbours", "loop", "shared_steps")
            ),
            *(
                f"tests/engine/test_{name}.py"
                for name in ("compiling_drafts", "failures", "hybrid", "asynchronous")
            ),
            "tests/exactness/test_contrastive.py",
        ),
    ),
    "formats of calls": Subject(
        ("server/formats/parser.py", "server/formats/calls.py"),
        ("tests/server/test_tools.py", "tests/server/test_call_grammar.py"),
    ),
}

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
NOT_RUN = (
    ast.Import,
    ast.ImportFrom,
    ast.Raise,
    ast.Assert,
    ast.JoinedStr,
)  # Python 3.11 misplaces parts of f-strings


class Mutant(NamedTuple):
    """One changed place. file: below the package.  line: where it begins.  before, after: its source.  text: the whole changed file."""

    file: str
    line: int
    before: str
    after: str
    text: str


class Verdict(NamedTuple):
    """What the tests said of a mutant. killer: the first test that failed, "time" where they ran too long; empty: it survives."""

    subject: str
    place: str
    before: str
    after: str
    killer: str
    seconds: float


def changed(node: ast.AST) -> ast.AST | None:
    """The node with a mistake in it; None where this kind of node gets none."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in COMPARISONS:
        other.ops[0] = COMPARISONS[type(other.ops[0])]()
        return other
    if isinstance(other, ast.BinOp) and type(other.op) in OPERATORS:
        other.op = OPERATORS[type(other.op)]()
        return other
    if isinstance(other, ast.BoolOp):
        other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
        return other
    if isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        return other.operand
    if isinstance(other, ast.IfExp):
        other.body, other.orelse = other.orelse, other.body
        return other
    if isinstance(other, ast.Constant) and type(other.value) is int:
        other.value += 1
        return other
    if isinstance(other, ast.Expr) and isinstance(other.value, ast.Call):
        return ast.Expr(ast.Constant(None))
    return None


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What runs within a node: neither annotations and decorators, nor imports and refusals."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not isinstance(child, NOT_RUN):
                yield child
                yield from running_nodes(child)


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file below the package, in the order of their places."""
    text = (ROOT / PACKAGE / file).read_text(encoding="utf-8")
    found = list[Mutant]()
    for node in running_nodes(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        other = changed(node)
        before = ast.get_source_segment(text, node) if other is not None else None
        if before is None or other is None:
            continue
        after = ast.unparse(other)
        inserted = after if isinstance(node, ast.stmt | ast.Constant) else f"({after})"
        found.append(Mutant(file, node.lineno, before, after, _replaced(text, node, before, inserted)))
    return sorted(found, key=lambda mutant: mutant.line)


def _replaced(text: str, node: ast.expr | ast.stmt, before: str, inserted: str) -> str:
    """The text with a node's source replaced; columns of syntax trees count bytes."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = start + len(before.encode())
    data = text.encode()
    return (data[:start] + inserted.encode() + data[end:]).decode()


def drawn(subject: Subject, count: int, seed: int) -> list[Mutant]:
    """So many mutants of a subject, without replacement."""
    everything = [mutant for file in subject.files for mutant in mutants(file)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def killer(mutant: Mutant | None, tests: tuple[str, ...], limit: float) -> str:
    """The first test that fails with the mutant, or without any; empty where all pass. limit: seconds.

    Raises:
        RuntimeError: no test was run.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy2(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            (folder / PACKAGE / mutant.file).write_text(mutant.text, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-m",
            "not slow",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "--no-header",
            *tests,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "NUMBA_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return "time"
    if done.returncode == 0:
        return ""
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    if not failures:
        raise RuntimeError(
            f"pytest ended with {done.returncode} and named no test:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return failures[0].split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")


def judged(subject: str, mutant: Mutant, limit: float) -> Verdict:
    """What the subject's tests say of a mutant."""
    began = time.monotonic()
    by = killer(mutant, SUBJECTS[subject].tests, limit)
    place = f"{mutant.file}:{mutant.line}"
    before = " ".join(mutant.before.split())
    return Verdict(subject, place, before, mutant.after, by, round(time.monotonic() - began, 1))


def table(verdicts: list[Verdict]) -> Table:
    """The survivors, below how many there were of each subject."""
    rows = Table("subject", "place", "before", "after", "killed by", box=None)
    for subject in dict.fromkeys(verdict.subject for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.subject == subject]
        survivors = [verdict for verdict in own if not verdict.killer]
        rows.add_row(subject, "", "", "", f"{len(own) - len(survivors)} of {len(own)}")
        for survivor in survivors:
            rows.add_row("", survivor.place, survivor.before, survivor.after, "nothing")
    return rows


def main(
    subject: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SUBJECTS)}; may be repeated.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Mutants of each subject.")] = 9,
    seed: int = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that the tests of a mutant may take.")] = 600,
    out: Out = Path("build/mutants"),
    quick: Quick = False,
) -> None:
    """Draws mutants and runs the tests on each; a run that was cut off goes on."""
    names = subject or (["formats of calls"] if quick else list(SUBJECTS))
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        raise typer.BadParameter(f"unknown subject {unknown[0]!r}; expected one of {', '.join(SUBJECTS)}")
    file = out / "mutants.csv"
    verdicts = read_rows(Verdict, file)
    for name in names:
        if (failure := killer(None, SUBJECTS[name].tests, limit)) and not quick:
            raise typer.BadParameter(f"the tests of {name!r} fail without a mutant: {failure}")
        for mutant in drawn(SUBJECTS[name], 1 if quick else count, seed):
            known = {(verdict.place, verdict.before, verdict.after) for verdict in verdicts}
            if (f"{mutant.file}:{mutant.line}", " ".join(mutant.before.split()), mutant.after) in known:
                continue
            verdicts.append(judged(name, mutant, limit))
            typer.echo(f"{verdicts[-1].place}: {verdicts[-1].killer or 'survives'}", err=True)
            append_rows(verdicts[-1:], file)
    Console().print(table(verdicts))


if __name__ == "__main__":
    typer.run(main)
