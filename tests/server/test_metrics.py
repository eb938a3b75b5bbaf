"""/metrics counts what was generated, and the dashboard asks for nothing that is not there."""

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polydraft.policy.acceptance import FIRST, NEXT
from tests.server.conftest import serving, small_engine

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
ASK = {"prompt": "def f(a):\n    return a\n\n\ndef f(a):\n", "max_tokens": 30, "temperature": 0}


def figures(served) -> dict[str, float]:
    """Totals by name, once the steps that were told of a moment before are counted."""
    found = None
    while found != (found := read(served)):
        time.sleep(0.05)
    return found


def read(served) -> dict[str, float]:
    """Totals by name; of one that has positions, of the first."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    samples = [s for family in families for s in family.samples]
    return {s.name: s.value for s in reversed(samples)} | {
        f"source={s.labels['source']}": s.value for s in samples if s.name == "polydraft:tokens_total"
    }


def test_what_a_request_did_is_counted(served):
    served.post("/v1/completions", **ASK)  # every figure is there
    before = figures(served)
    usage = served.post("/v1/completions", **ASK, n=2).json()["usage"]
    after = figures(served)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    told = usage["speculation"]
    prompt = usage["prompt_tokens"]
    assert grown["vllm:generation_tokens_total"] == usage["completion_tokens"] == 60
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == 2 * prompt
    assert 0 < grown["vllm:prefix_cache_hits_total"] <= 2 * prompt
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == told["drafted_tokens"] > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == told["accepted_tokens"] > 0
    assert grown["polydraft:tokens_per_step_count"] == told["steps"]
    assert (
        grown["vllm:time_to_first_token_seconds_count"]
        == grown["vllm:e2e_request_latency_seconds_count"]
        == 2
    )
    first = (
        grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] / grown["polydraft:drafts_per_pos_total"]
    )
    assert first == told["acceptance_by_depth"][0]
    assert grown["source=target"] + grown["source=ngram"] == 60
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert 0 < after["vllm:kv_cache_usage_perc"] < 1


@pytest.fixture(scope="module")
def adaptive():
    """A server whose drafts follow the adaptive policy."""
    with serving(small_engine(depth=None)) as running:
        yield running


def test_the_cost_model_is_told_as_the_policy_sees_it(adaptive):
    adaptive.post("/v1/completions", **ASK)
    figures(adaptive)
    families = {
        family.name: family for family in text_string_to_metric_families(adaptive.http.get("/metrics").text)
    }
    costs = adaptive.engine.policy.live.costs
    passes = {int(s.labels["rows"]): s.value for s in families["polydraft:cost_model_pass_seconds"].samples}
    assert passes == {rows: costs.rows(rows) for rows in (1, 4, 8, 16, 32, 64)} and min(passes.values()) > 0
    assert families["polydraft:cost_model_draft_step_seconds"].samples[0].value == costs.draft_step
    assert families["polydraft:cost_model_overhead_seconds"].samples[0].value == costs.overhead
    rates = {
        (s.labels["mode"], s.labels["draft"]): s.value
        for s in families["polydraft:policy_acceptance_rate"].samples
    }
    seen = {
        "sampled": adaptive.engine.policy.acceptance[False],
        "greedy": adaptive.engine.policy.acceptance[True],
    }
    lanes = {"first": FIRST, "next": NEXT}
    assert rates == {(mode, draft): seen[mode].rates[lane] for mode in seen for draft, lane in lanes.items()}
    lengths = {s.name: s.value for s in families["polydraft:speculation_length"].samples}
    assert lengths["polydraft:speculation_length_count"] > 0 < lengths["polydraft:speculation_length_sum"]


def test_the_dashboard_asks_for_what_is_there_and_for_all_of_it(adaptive):
    adaptive.post("/v1/completions", **ASK)
    text = DASHBOARD.read_text(encoding="utf-8")
    asked = set(re.findall(r"(?:vllm|polydraft):\w+", text))
    there = set(figures(adaptive))
    assert asked - there == set()
    told = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in there
        if ":" in name and not name.endswith("_created")
    }
    assert told == {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    boxes = [tuple(panel["gridPos"].values()) for panel in json.loads(text)["panels"]]
    assert len({box[2:] for box in boxes}) == len(boxes)
