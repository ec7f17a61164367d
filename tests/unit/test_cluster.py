"""A cluster's parts that need no cluster: the roll, the sum of series, options, and where a draft is looked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster import arguments, names
from cluster.exposition import merge
from cluster.names import Finder
from cluster.plan import Plan
from cluster.resources import actor_options, describe, device, parse
from cluster.roll import LOST_S, Member, Roll
from outrider.certs.issue import issue
from outrider.errors import InvalidArgument, Unavailable

MEMBER = Member("10.0.0.1", "10.0.0.1:50050", "", "a model")


class Process:
    """One process's series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter("outrider:answers", "Answers.", ["reason"], registry=self.registry)
        self.times = Histogram("outrider:seconds", "Times.", buckets=(1, 2), registry=self.registry)
        self.running = Gauge("outrider:num_requests_running", "Now.", registry=self.registry)
        self.links = Gauge("outrider:links_up", "Links.", ["part"], registry=self.registry)
        self.expires = Gauge("outrider:certificate_expiry_timestamp_seconds", "When.", registry=self.registry)
        self.share = Gauge("outrider:kv_cache_usage_perc", "Share.", ["side"], registry=self.registry)

    def answer(self, count: int = 1) -> None:
        self.answers.labels("stop").inc(count)
        self.times.observe(1.5)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


def value(text: str, name: str, **labels: str) -> float | None:
    """Of one series."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def plan(*words: str, has_gpus: bool = False) -> Plan:
    return arguments.plan(arguments.parser().parse_args(list(words)), has_gpus=has_gpus)


class TestSeries:
    def test_counts_are_added_up_and_shares_are_not(self) -> None:
        """A scrape that reaches one of several processes would show another sum each time."""
        one, other = Process(), Process()
        one.answer(3)
        other.answer(4)
        one.running.set(2)
        other.running.set(5)
        one.links.labels("target").set(2)
        other.links.labels("target").set(1)
        one.expires.set(1_000)
        other.expires.set(2_000)
        one.share.labels("target").set(0.5)
        other.share.labels("target").set(0.25)
        text = merge([one.text, other.text])
        assert value(text, "outrider:answers_total", reason="stop") == 7
        assert value(text, "outrider:seconds_count") == 2
        assert value(text, "outrider:seconds_bucket", le="2.0") == 2
        assert value(text, "outrider:seconds_bucket", le="1.0") == 0
        assert value(text, "outrider:num_requests_running") == 7
        assert value(text, "outrider:kv_cache_usage_perc", side="target") == 0.5
        assert value(text, "outrider:links_up", part="target") == 3
        assert value(text, "outrider:certificate_expiry_timestamp_seconds") == 1_000
        assert merge([one.text]) == one.text

    def test_no_sum_falls_when_a_coordinator_goes_is_lost_or_comes_back(self) -> None:
        """A sum that falls reads as a restart, and its rate as traffic that never was."""
        roll, processes, seen, now_s = Roll(), {name: Process() for name in "abc"}, [0.0], 0.0

        def scrape() -> float:
            text = roll.exposition(now_s)
            seen.append(value(text, "outrider:answers_total", reason="stop") or 0.0)
            assert seen[-1] >= seen[-2]
            return value(text, "outrider:num_requests_running") or 0.0

        for name, process in processes.items():
            process.answer(2)
            process.running.set(1)
            roll.report(name, MEMBER, process.text, now_s)
        assert scrape() == 3
        processes["a"].answer()
        roll.leave("a", processes["a"].text)
        assert scrape() == 2
        assert seen[-1] == 7
        now_s = LOST_S / 2
        roll.report("b", MEMBER, processes["b"].text, now_s)
        now_s = LOST_S + 1  # nothing was heard of c
        assert scrape() == 1
        assert list(roll.members(now_s)) == ["b"]
        roll.report("c", MEMBER, processes["c"].text, now_s)  # it was only slow
        assert scrape() == 2
        assert seen[-1] == 7
        for number in range(100):
            short = Process()
            short.answer()
            roll.leave(f"short-lived {number}", short.text)
            scrape()
        assert seen[-1] == 107

    def test_ordinals_are_the_smallest_free_ones(self) -> None:
        """They spread coordinators over drafts."""
        roll = Roll()
        assert [roll.join(name, 0.0) for name in "abca"] == [0, 1, 2, 0]
        roll.leave("b", "")
        assert roll.join("d", 0.0) == 1


class TestOptions:
    def test_resources_are_ray_s(self) -> None:
        """An accelerator type is a resource of its own name, of which Ray gives a thousandth to each actor."""
        wanted = parse("target-resources", '{"GPU": 2, "CPU": 4, "accelerator_type": "H100", "memory": 8589934592}')
        assert actor_options(wanted) == {
            "num_cpus": 4.0,
            "num_gpus": 2.0,
            "memory": 8589934592.0,
            "resources": {"accelerator_type:H100": 0.001},
        }
        assert describe(wanted) == "CPU 4, GPU 2, H100, memory 8.0 GiB"
        assert [device({"GPU": gpus}) for gpus in (0, 0.5, 1, 4)] == ["cpu", "cuda:0", "cuda:0", "auto"]

    @pytest.mark.parametrize("text", ["GPU", "[]", "{}", '{"GPU": 0}', '{"GPU": -1}', '{"GPU": true}', '{"GPU": 1.5}'])
    def test_resources_that_make_no_sense_name_the_option(self, text: str) -> None:
        """Ray would take some of them and wait for ever."""
        with pytest.raises(InvalidArgument, match="draft-resources"):
            parse("draft-resources", text)

    def test_admission_is_the_coordinators_share_of_the_targets(self) -> None:
        """Serve's own limit must be the larger one, or it would queue what admission refuses with 429."""
        replicas = ["--target-replicas", "3", "--coordinator-replicas", "2-4"]
        made = plan("--target", "stub:markov", *replicas, "--insecure")
        assert made.running == 96
        assert made.max_ongoing_requests > 96 * (1 + 4 + 4)
        assert (made.least_coordinators, made.most_coordinators) == (2, 4)
        options = made.coordinator("10.0.0.1", 1)
        assert options.front.max_num_seqs == 96
        assert options.decoder.target == ("target/0", "target/1", "target/2")
        assert options.decoder.draft == "draft"
        assert options.addresses.host == "10.0.0.1"

    def test_plain_text_stays_on_this_machine_unless_it_is_meant(self, tmp_path: Path) -> None:
        """Prompts and answers would cross the cluster's network for everybody on it to read."""
        with pytest.raises(InvalidArgument, match=r"certs: 10\.0\.0\.1 is not loopback"):
            plan("--target", "stub:markov").coordinator("10.0.0.1", 0)
        assert plan("--target", "stub:markov").coordinator("127.0.0.3", 0)
        issue(tmp_path)
        made = plan("--target", "stub:markov", "--certs", str(tmp_path))
        options = made.coordinator("10.0.0.1", 0)
        assert made.draft is not None
        for service in (made.target, made.draft):
            assert service.config.ssl_certfile == f"{tmp_path}/{service.role}.pem"
            assert service.config.ssl_ca_certs == f"{tmp_path}/ca.pem"
        assert options.decoder.tls.certfile == options.addresses.tls.certfile == f"{tmp_path}/coordinator.pem"
        assert options.decoder.tls.ca_certs == f"{tmp_path}/ca.pem"
        assert options.addresses.tls.ca_certs is None

    def test_models_with_weights_get_a_gpu_where_there_is_one(self) -> None:
        """And n-gram lookup does not."""
        made = plan("--target", "some/model", has_gpus=True)
        assert made.target.resources == {"GPU": 1.0}
        assert made.target.config.device == "cuda:0"
        assert made.draft is not None
        assert made.draft.resources == {"CPU": 1.0}
        assert plan("--target", "some/model", "--draft", "none").draft is None

    def test_flags_of_a_part_reach_it_and_may_not_overrule_deploy(self) -> None:
        """Everything that a process takes can be said on a cluster as well."""
        made = plan("--target", "stub:markov", "--target-flags", "--max-num-seqs 8", "--coordinator-flags", "--gamma 3")
        assert made.target.config.max_num_seqs == 8
        assert made.options.decoder.num_speculative_tokens == 3
        with pytest.raises(InvalidArgument, match="target-flags: --host"):
            plan("--target-flags", "--host 0.0.0.0")

    @pytest.mark.parametrize(
        "words",
        [
            ("--name", "a/b"),
            ("--coordinator-replicas", "4-2"),
            ("--coordinator-replicas", "x"),
            ("--target-replicas", "0"),
        ],
    )
    def test_other_mistakes_name_the_option(self, words: tuple[str, str]) -> None:
        """Before a cluster is joined."""
        with pytest.raises(InvalidArgument, match=words[0].removeprefix("--")):
            plan("--target", "stub:markov", *words)

    def test_a_configuration_file_says_the_same(self) -> None:
        """Serve's file holds YAML, the command line text."""
        args = {
            "target": "stub:markov",
            "target-resources": {"GPU": 1},
            "draft_replicas": 2,
            "coordinator-flags": "--gamma 2",
        }
        made = arguments.plan(arguments.from_mapping(args), has_gpus=True)
        assert made.target.resources == {"GPU": 1.0}
        assert made.draft is not None
        assert made.draft.replicas == 2
        assert made.options.decoder.num_speculative_tokens == 2
        with pytest.raises(InvalidArgument, match="--targets"):
            arguments.from_mapping({"targets": "stub:markov"})


class TestFinder:
    async def test_a_coordinator_whose_draft_is_away_takes_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One dead draft should not leave its coordinators without any; a target's name means that target alone."""
        places = {"app/draft/0": "", "app/draft/1": "10.0.0.2:1", "app/draft/2": "10.0.0.3:1", "app/target/1": ""}

        class Actor:
            def __init__(self, name: str) -> None:
                self.address = self
                self.name = name

            async def remote(self) -> str:
                return places[self.name]

        def find(name: str) -> Any:
            return Actor(name) if name in places else None

        monkeypatch.setattr(names, "find", find)
        assert await Finder("app", 3, 2)("draft") == "10.0.0.3:1"
        assert await Finder("app", 3, 3)("draft") == "10.0.0.2:1"
        del places["app/draft/2"]
        assert await Finder("app", 3, 5)("draft") == "10.0.0.2:1"
        places["app/draft/1"] = ""
        with pytest.raises(Unavailable, match=r"no actor app/draft/2.*app/draft/0 has not begun.*app/draft/1"):
            await asyncio.wait_for(Finder("app", 3, 2)("draft"), 5)
        with pytest.raises(Unavailable, match="app/target/1 has not begun to listen"):
            await Finder("app", 3, 0)("target/1")
