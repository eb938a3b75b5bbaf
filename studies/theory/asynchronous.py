"""When drafting while verifying is faster: tokens per second of both ways, from seconds and acceptance.

After the scheme of McDanel 2024, AMUSD (arXiv 2410.17375); the formula is ours.

    a   acceptance of a drafted token, the same at every depth and independent      c   chance that the extra token is the one that waits
    t   seconds of a draft step       T(n)  seconds of a pass that takes n drafts    m   smallest lead      L, C  most that a pass takes, and that wait

    synchronous      E(n) / (n t + T(n)),   E(n) = 1 + a + .. + a^n
    asynchronous     cycles that a rollback ends. After it the worker finishes its step, draws m tokens, and a pass takes them. While it runs,
                     k more come. With chance s = a^n c nothing is lost and the next pass finds k - 1; else the cycle ends.
                     rate = sum_j P_j E(n_j) / (sum_j P_j (wait_j + T(n_j)) + residual step),   P_j = s_0 .. s_(j-1)

Exact for constant seconds. What is won is at most the drafting, n t of n t + T(n), and only where whole drafts are kept: a cycle of one pass takes
longer than a synchronous round of m drafts, by the residual step. Seconds are those with both workers at work: on cores that share memory both are longer.
"""

from collections.abc import Callable

from polydraft.errors import InvalidInputError
from polydraft.theory.speed import tokens_of_chain

NEGLIGIBLE = 1e-12


def synchronous_rate(
    acceptance: float, draft_seconds: float, verify_seconds: Callable[[int], float], depth: int
) -> float:
    """Tokens per second of rounds that draft, then verify.

    Example:
        >>> synchronous_rate(1.0, 1.0, lambda drafts: 4.0, 4)
        0.625
    """
    return tokens_of_chain(acceptance, depth) / (depth * draft_seconds + verify_seconds(depth))


def asynchronous_rate(
    acceptance: float,
    draft_seconds: float,
    verify_seconds: Callable[[int], float],
    *,
    min_lead: int,
    depth: int,
    cap: int,
    match: float | None = None,
) -> float:
    """Tokens per second of drafting while verifying, with constant seconds. match: c above; default the acceptance.

    Raises:
        InvalidInputError: sizes that do not fit, or seconds that are not positive.

    Example:
        >>> rate = asynchronous_rate(1.0, 1.0, lambda drafts: 4.0, min_lead=1, depth=4, cap=8)
        >>> round(rate, 3)  # four tokens in four seconds: the drafting is hidden
        1.0
    """
    if not 1 <= min_lead <= depth <= cap or draft_seconds <= 0 or verify_seconds(min_lead) <= 0:
        raise InvalidInputError(
            f"min_lead={min_lead}, depth={depth}, cap={cap}, draft_seconds={draft_seconds} were given; expected 1 <= min_lead <= depth <= cap and positive seconds."
        )
    c = acceptance if match is None else match
    tokens = seconds = 0.0
    reached = 1.0
    lead = 0
    begun = 0.0  # tokens that wait, and seconds since the step in flight began
    for _ in range(100_000):
        wait = max(0.0, (min_lead - lead) * draft_seconds - begun)
        if lead < min_lead:
            lead = min_lead
            begun = 0.0
        taken = min(lead, depth)
        rows = verify_seconds(min(lead, depth))
        drawn = min(int((begun + rows) / draft_seconds + 1e-9), cap - lead)
        idle = lead + drawn == cap
        begun = 0.0 if idle else max(0.0, begun + rows - drawn * draft_seconds)
        tokens += reached * tokens_of_chain(acceptance, taken)
        seconds += reached * (wait + rows)
        over = lead + drawn - taken
        residual = 0.0 if idle else draft_seconds - begun
        kept = acceptance**taken * c if over else 0.0
        seconds += reached * (1 - kept) * residual
        reached = reached * kept
        lead = over - 1
        if reached < NEGLIGIBLE:
            break
    return tokens / seconds
