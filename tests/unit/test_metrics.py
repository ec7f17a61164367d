"""Prometheus series: all of them are there from the start, and every one is moved by what it counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.counters import Counters
from coordinator.decoding_series import DecodingSeries
from coordinator.front import FrontConfig
from coordinator.part_series import CertificateSeries, PartSeries
from coordinator.parts import Degraded
from outrider.certs.issue import issue
from outrider.drift import View
from outrider.errors import DeadlineExceeded
from outrider.seam import Timings
from tests.scripted_decoder import MODEL, ScriptedDecoder, http_client

MOVED_BY_REQUESTS = {
    "outrider:prompt_tokens_total",
    "outrider:generation_tokens_total",
    "outrider:request_success_total{finished_reason=stop}",
    "outrider:request_success_total{finished_reason=length}",
    "outrider:request_success_total{finished_reason=error}",
    "outrider:request_rejected_total{status=400}",
    "outrider:request_rejected_total{status=404}",
    "outrider:ignored_request_fields_total",
    "outrider:time_to_first_token_seconds_count",
    "outrider:inter_token_latency_seconds_count",
    "outrider:e2e_request_latency_seconds_count",
    "outrider:spec_decode_num_drafts_total",
    "outrider:spec_decode_num_draft_tokens_total",
    "outrider:spec_decode_num_tested_tokens_total",
    "outrider:spec_decode_num_accepted_tokens_total",
    "outrider:spec_decode_num_accepted_tokens_per_pos_total{position=0}",
    "outrider:spec_decode_num_accepted_tokens_per_pos_total{position=1}",
}
EXIST = {
    "outrider:num_requests_running",
    "outrider:num_requests_waiting",
    "outrider:links_up{part=target}",
    "outrider:links_wanted{part=draft}",
    "outrider:acceptance_drift",
    "outrider:acceptance_drifted",
    "outrider:kv_cache_usage_perc{side=target}",
    "outrider:kv_cache_usage_perc{side=draft}",
    "outrider:graph_replay_perc{side=target}",
    "outrider:draft_failures_total{reason=overdue}",
    "outrider:draft_skipped_total{reason=no_draft}",
    "outrider:gamma_count",
    "outrider:step_seconds_count{side=draft,stage=forward}",
    "outrider:step_seconds_count{side=target,stage=total}",
    "outrider:draft_skipped_total{reason=no_features}",
    "outrider:wire_bytes_total{kind=q,link=draft}",
    "outrider:prefix_cache_hits_total{link=draft}",
    "outrider:num_preemptions_total{link=target}",
    "outrider:wire_bytes_total{kind=features,link=target}",
    "outrider:wire_bytes_total{kind=ids,link=target}",
    "outrider:request_success_total{finished_reason=abort}",
    "outrider:request_rejected_total{status=401}",
    "outrider:request_rejected_total{status=413}",
    "outrider:request_rejected_total{status=429}",
    "outrider:event_loop_lag_seconds_count",
}


def samples(text: str) -> dict[str, float]:
    """Values by name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def test_every_series_exists_from_the_start_and_requests_move_theirs() -> None:
    """Guards dashboards against series that are absent until first use, or 0 for ever."""
    decoder = ScriptedDecoder(round_size=3)
    good = {"model": MODEL, "prompt": "hi"}
    async with http_client(decoder, FrontConfig(max_speculative_tokens=4)) as client:
        before = samples((await client.get("/metrics")).text)
        assert before.keys() >= MOVED_BY_REQUESTS | EXIST
        for body in (
            {**good, "max_tokens": 6},
            {**good, "stop": "c"},
            {**good, "surprise": 1},
            {**good, "n": 0},
            {**good, "model": "x"},
        ):
            await client.post("/v1/completions", json=body)
        decoder.error = DeadlineExceeded("late")
        await client.post("/v1/completions", json=good)
        after = samples((await client.get("/metrics")).text)
    assert {name for name in MOVED_BY_REQUESTS if not after[name] > before[name]} == set()
    assert after["outrider:num_requests_running"] == 0


async def test_counters_equal_what_was_sent() -> None:
    """Guards against tokens behind the stop in the counters, and against a round counted twice."""
    async with http_client(ScriptedDecoder(round_size=3)) as client:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 8}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        found = samples((await client.get("/metrics")).text)
    assert found["outrider:prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["outrider:generation_tokens_total"] == usage["completion_tokens"] == 8
    assert found["outrider:spec_decode_num_drafts_total"] == 3
    assert found["outrider:spec_decode_num_accepted_tokens_total"] == 5
    assert found["outrider:inter_token_latency_seconds_count"] == 5


def test_the_decoding_loop_s_counts_are_exported() -> None:
    """Guards gamma, failures, skips and step times, which no scripted decoder moves."""
    counters = Counters()
    series = DecodingSeries(counters, 4)
    counters.gamma[3] += 2
    counters.draft_failures["overdue"] += 1
    counters.draft_skipped["no_draft"] += 5
    for notice in counters.on_step:
        notice("target", Timings(queue_ms=1, forward_ms=20, sample_ms=2, total_ms=25))
    found = {
        (sample.name, *sample.labels.values()): sample.value for family in series.collect() for sample in family.samples
    }
    assert found["outrider:gamma_sum",] == 6
    assert found["outrider:gamma_count",] == 2
    assert found["outrider:gamma_bucket", "2.0"] == 0
    assert found["outrider:draft_failures_total", "overdue"] == 1
    assert found["outrider:draft_skipped_total", "no_draft"] == 5
    assert found["outrider:step_seconds_sum", "target", "forward"] == 0.02


def test_links_up_and_wanted_follow_the_parts() -> None:
    """Guards the alerts on a lost target and a lost draft."""
    state = ScriptedDecoder().state
    missing = [Degraded("target", "gone", 1.0), Degraded("draft", "gone", 1.0)]
    half = state._replace(targets_up=1, draft=None, degraded=missing, kv_use={"target": 0.25})
    half = half._replace(replayed={"target": 0.75})
    half = half._replace(acceptance=View(0.7, 0.5, True))
    registry = CollectorRegistry()
    registry.register(PartSeries(lambda: half))
    found = samples(generate_latest(registry).decode())
    assert found == {
        "outrider:links_up{part=target}": 1,
        "outrider:links_up{part=draft}": 0,
        "outrider:links_wanted{part=target}": 2,
        "outrider:links_wanted{part=draft}": 1,
        "outrider:kv_cache_usage_perc{side=target}": 0.25,
        "outrider:kv_cache_usage_perc{side=draft}": 0,
        "outrider:graph_replay_perc{side=target}": 0.75,
        "outrider:graph_replay_perc{side=draft}": 0,
        "outrider:acceptance_drift": pytest.approx(0.2),
        "outrider:acceptance_drifted": 1,
    }


def test_a_certificates_end_is_a_series_that_follows_its_file(tmp_path: Path) -> None:
    """Guards against the day on which every client is refused at once."""
    issue(tmp_path, days=10)
    path = str(tmp_path / "target.pem")
    registry = CollectorRegistry()
    registry.register(CertificateSeries([path, None, path]))

    def left_days() -> float:
        (value,) = samples(generate_latest(registry).decode()).values()
        return (value - time.time()) / 86_400

    assert 9.9 < left_days() < 10.1
    issue(tmp_path, days=20)
    assert 19.9 < left_days() < 20.1
    (tmp_path / "target.pem").unlink()
    assert left_days() < 0
