"""What a request is charged with leaves compiling out; its first token comes when it comes."""

from typing import ClassVar

import numba

from polydraft import Budget, Engine, SamplingParams
from polydraft.core.geometry import chain
from polydraft.numerics import compile_time
from polydraft.policy.fixed import FixedPolicy
from tests.engine.tables import TableModel


class CompilingPolicy(FixedPolicy):
    """Compiles a function of its own in every round; `compiled`: seconds of compiling, of the process, after each."""

    compiled: ClassVar[list[float]] = []

    def budgets(self, sequences):
        numba.njit(lambda x: x * 3 + 1)(2)
        self.compiled.append(compile_time.seconds())
        return super().budgets(sequences)


def test_seconds_and_tokens_per_second_leave_out_what_was_compiled_meanwhile():
    fast = Engine.of(
        TableModel(), draft_model=TableModel(seed=1), policy=CompilingPolicy(Budget.fixed(chain(2)))
    )
    before = compile_time.seconds()
    stats = fast.generate([1, 2], SamplingParams(temperature=0, max_tokens=6))[0].stats
    compiled = compile_time.seconds() - before
    assert stats.total_seconds < 0.5 * compiled
    assert stats.tokens_per_second > stats.generated_tokens / (0.5 * compiled)
    assert stats.seconds_to_first_token > CompilingPolicy.compiled[0] - before
