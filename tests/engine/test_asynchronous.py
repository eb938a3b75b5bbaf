"""The engine in a thread of its own: streams for many coroutines, cancelled within a step, failing one by one."""

import asyncio
import threading
from contextlib import aclosing

import pytest

from polydraft import AsyncEngine, Engine, SamplingParams, StructuredOutputs
from polydraft.engine import asynchronous
from polydraft.engine.api import Engine as EngineClass
from polydraft.engine.asynchronous import COMPILERS
from polydraft.errors import BusyError, CapacityError, InvalidInputError, PolydraftError
from tests.engine.tables import TableModel, plain_greedy
from tests.engine.test_structured import engine as constrained
from tests.engine.test_structured import tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=9)
LONG = SamplingParams(temperature=0, max_tokens=40)


def tables(target=None, **options):
    return Engine.of(target or TableModel(max_num_seqs=3), drafter="ngram", depth=3, **options)


async def tokens_of(engine, prompt, params=GREEDY):
    return [token async for output in engine.stream(prompt, params) for token in output.token_ids]


def test_many_coroutines_get_what_each_gets_alone():
    async def main():
        async with AsyncEngine(tables()) as engine:
            prompts = [[t, i] for t in range(4) for i in range(5)]
            return prompts, await asyncio.gather(*(tokens_of(engine, p) for p in prompts)), engine.engine

    prompts, found, engine = asyncio.run(main())
    assert found == [plain_greedy(engine.target, p, 9) for p in prompts]
    assert isinstance(engine.target, TableModel) and engine.num_free == 3
    assert not engine._outbox.streams and not any(engine.target.texts)


def test_what_chats_and_grammars_need_is_there_before_the_first_request(monkeypatch):
    monkeypatch.setattr(asynchronous, "UNASKED_SECONDS", 0.01)
    prepared = list[str]()
    done = threading.Event()
    monkeypatch.setattr(EngineClass, "prepare_chats", lambda self: prepared.append("chats"))
    monkeypatch.setattr(
        EngineClass, "prepare_grammars", lambda self: prepared.append("grammars") or done.set()
    )

    async def main():
        async with AsyncEngine(tables()):
            return await asyncio.to_thread(done.wait, 20)

    assert asyncio.run(main()) and prepared[:2] == ["chats", "grammars"]


class Gated(TableModel):
    """Passes wait for the gate, and are counted."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()

    def score(self, *given, **options):
        self.gate.wait()
        return super().score(*given, **options)


def test_a_cancelled_stream_gives_its_slot_to_the_next_step():
    async def main():
        target = Gated(max_num_seqs=1)
        async with AsyncEngine(tables(target)) as engine:
            outputs = engine.stream([1], LONG)
            await anext(outputs)
            target.gate.clear()

            async def rest():
                _ = [output async for output in outputs]

            reading = asyncio.create_task(rest())
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait({reading})
            assert reading.cancelled()
            seen = target.passes
            other = asyncio.create_task(tokens_of(engine, [2]))
            await asyncio.sleep(0.01)
            target.gate.set()
            assert await other == plain_greedy(target, [2], 9)
            rounds = target.passes - seen
        return rounds, engine.engine.num_free

    rounds, free = asyncio.run(main())
    assert free == 1
    assert (
        rounds <= 1 + 9
    )  # the step that ran, and those of the other; the 40 tokens of the first would take ten more


def awaited(work, **options):
    """What a coroutine gives that asks an engine of tables."""

    async def main():
        async with AsyncEngine(tables(**options)) as engine:
            return await work(engine)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "params",
    [SamplingParams(n=3, max_tokens=9, seed=5), [SamplingParams(max_tokens=9, seed=seed) for seed in (1, 2)]],
    ids=["one for all", "one each"],
)
def test_results_are_those_of_the_engine(params):
    prompts = [[1, 2], [3]]
    ours = awaited(lambda engine: engine.generate(prompts, params, first_index=4))
    alone = tables().generate(prompts, params, first_index=4)
    assert [[s.token_ids for s in result.samples] for result in ours] == [
        [s.token_ids for s in r.samples] for r in alone
    ]
    assert [(r.index, r.seed, r.prompt_token_ids) for r in ours] == [
        (r.index, r.seed, r.prompt_token_ids) for r in alone
    ]
    assert [s.index for s in ours[0].samples] == list(range(len(ours[0].samples)))


def test_prompts_and_params_that_do_not_pair_are_refused_as_by_the_engine():
    with pytest.raises(InvalidInputError, match="2 prompts and 1 params"):
        awaited(lambda engine: engine.generate([[1], [2]], [GREEDY]))
    with pytest.raises(InvalidInputError, match="expected a SamplingParams"):
        awaited(lambda engine: engine.generate([1], {"temperature": 0}))
    assert awaited(lambda engine: engine.generate([])) == []


def test_a_chat_is_answered_as_by_the_engine():
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}b"
    messages = [{"role": "user", "content": "aab"}]
    answer = awaited(lambda engine: engine.chat(messages, GREEDY), tokenizer=words)
    alone = tables(tokenizer=words).chat(messages, GREEDY)
    assert (answer.text, answer.prompt_token_ids) == (alone.text, alone.prompt_token_ids)
    assert answer.stats.generated_tokens == 9
    assert awaited(lambda engine: engine.chat(messages), tokenizer=words).samples[0].finish_reason


class Poisoned(TableModel):
    """A pass over a text that begins with 6 fails."""

    def score(self, slots, tree, **options):
        if any(6 in self.texts[slot][:1] for slot in slots):
            raise RuntimeError("poison")
        return super().score(slots, tree, **options)


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
def test_a_request_that_breaks_the_target_fails_alone_and_the_others_keep_their_tokens(caplog):
    async def main():
        async with AsyncEngine(tables(Poisoned(max_num_seqs=3))) as engine:
            prompts = [[1, 2], [6, 1], [3], [6, 2], [4, 5]]
            return engine, prompts, await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))

    engine, prompts, found = asyncio.run(main())
    for prompt, (result,) in zip(prompts, found, strict=True):
        if prompt[0] == 6:
            assert result.finish_reason == "error" and "poison" in str(result.samples[0].error)
            assert result.id in caplog.text
        else:
            assert result.token_ids == plain_greedy(engine.engine.target, prompt, 9)
    assert engine.engine.num_free == 3


def test_without_isolation_the_same_failure_has_no_end(monkeypatch):
    """The wrong variant: what was interrupted is only run again."""
    monkeypatch.setattr(EngineClass, "isolate", lambda self: [])

    async def main():
        async with AsyncEngine(tables(Poisoned())) as engine:
            await asyncio.wait_for(engine.generate([6, 1], GREEDY), 0.2)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(main())


def test_no_more_may_wait_than_was_said_and_what_does_not_fit_is_told_apart():
    async def main():
        target = Gated(max_num_seqs=1)
        target.gate.clear()
        async with AsyncEngine(tables(target), max_waiting=2) as engine:
            asked = [asyncio.create_task(tokens_of(engine, [1])) for _ in range(3)]
            await asyncio.sleep(0.05)
            with pytest.raises(BusyError, match="2 may"):
                await tokens_of(engine, [1])
            with pytest.raises(CapacityError) as told:
                await tokens_of(engine, [1] * 64)
            target.gate.set()
            return told.value, await asyncio.gather(*asked)

    told, found = asyncio.run(main())
    assert isinstance(told, BusyError)  # the queue is full, whatever the prompt
    assert len(found) == 3


def test_closing_drains_then_aborts_and_takes_nothing_more():
    async def main():
        target = Gated()
        async with AsyncEngine(tables(target)) as engine:
            short = asyncio.create_task(engine.generate([1], GREEDY))
            await asyncio.sleep(0.02)
            await engine.close(5)
            target.gate.clear()
            with pytest.raises(BusyError):
                await engine.generate([2], GREEDY)
        async with AsyncEngine(tables(target)) as engine:
            stuck = asyncio.create_task(engine.generate([1], LONG))
            await asyncio.sleep(0.02)
            asyncio.get_running_loop().call_later(0.05, target.gate.set)
            await engine.close()
        return (await short)[0].finish_reason, (await stuck)[0].finish_reason

    assert asyncio.run(main()) == ("length", "abort")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_said_to_every_stream():
    def broken(*_):
        raise MemoryError

    async def main():
        async with (
            AsyncEngine(tables(), observe=broken) as engine,
            aclosing(engine.stream([1], LONG)) as outputs,
        ):
            with pytest.raises(PolydraftError, match="has died"):
                _ = [output async for output in outputs]
            assert not engine.running

    asyncio.run(main())


def form(**asked) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=9, structured_outputs=StructuredOutputs(**asked))


@pytest.fixture
def release(monkeypatch):
    """Until it is set, regular expressions are not compiled, as one may take a second."""
    release = threading.Event()
    compile_grammar = EngineClass.compile_grammar

    def held(self, wanted):
        if wanted.regex:
            release.wait()
        return compile_grammar(self, wanted)

    monkeypatch.setattr(EngineClass, "compile_grammar", held)
    yield release
    release.set()


def test_a_grammar_is_compiled_beside_requests_with_other_grammars_and_without(release):
    async def main():
        async with AsyncEngine(constrained()) as engine:
            slow = asyncio.create_task(tokens_of(engine, [5, 5], form(regex="[ab]+")))
            while engine._compiling == 0:
                await asyncio.sleep(0)
            assert await tokens_of(engine, [5, 5], form(choice=["ab", "c"]))
            assert await tokens_of(engine, [5, 5], SamplingParams(max_tokens=3))
            assert not slow.done()
            release.set()
            return await slow

    assert asyncio.run(main())


def test_the_loop_goes_on_while_a_grammar_is_compiled():
    """This one takes half a second."""

    async def main():
        async with AsyncEngine(constrained()) as engine:
            slow = asyncio.create_task(tokens_of(engine, [5, 5], form(regex="(a{300}){300}")))
            ticks = 0
            while not slow.done():
                ticks += 1
                await asyncio.sleep(0.01)
            return ticks, await slow

    ticks, tokens = asyncio.run(main())
    assert ticks > 5 and tokens


def test_a_grammar_whose_client_leaves_before_its_turn_is_never_compiled(release):
    async def main():
        async with AsyncEngine(constrained()) as engine:
            grammars = engine.engine._admission.grammars()
            before = [
                asyncio.create_task(tokens_of(engine, [5, 5], form(regex=c))) for c in "abc"[:COMPILERS]
            ]
            left, stays = (
                asyncio.create_task(tokens_of(engine, [5, 5], form(choice=[text]))) for text in ("ab", "c")
            )
            while engine._compiling < COMPILERS + 2:
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait({left})
            release.set()
            assert await stays
            await asyncio.gather(*before)
            return list(grammars._cached), engine._compiling

    cached, compiling = asyncio.run(main())
    assert len(cached) == 1 + COMPILERS and not any("ab" in key for key in cached) and compiling == 0


def test_so_many_grammars_wait_and_no_more(monkeypatch, release):
    monkeypatch.setattr(asynchronous, "MOST_COMPILING", COMPILERS)

    async def main():
        async with AsyncEngine(constrained()) as engine:
            before = [
                asyncio.create_task(tokens_of(engine, [5, 5], form(regex=c))) for c in "abc"[:COMPILERS]
            ]
            while engine._compiling < COMPILERS:
                await asyncio.sleep(0)
            with pytest.raises(BusyError, match="grammars are being compiled"):
                await tokens_of(engine, [5, 5], form(choice=["ab"]))
            release.set()
            await asyncio.gather(*before)
            assert await tokens_of(engine, [5, 5], form(choice=["ab"]))

    asyncio.run(main())


def test_what_all_grammars_need_is_made_behind_the_first_answer_while_nobody_waits():
    async def main():
        async with AsyncEngine(constrained()) as engine:
            engine.engine._admission._grammars = None
            await engine.generate([5, 5], LONG)
            for _ in range(1000):
                if engine.engine._admission._grammars is not None:
                    break
                await asyncio.sleep(0.01)
            return engine.engine._admission._grammars is not None

    assert asyncio.run(main())
