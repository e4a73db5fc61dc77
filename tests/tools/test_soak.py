from __future__ import annotations

from typing import Any

import pytest

from tools.soak import Clients, Request, Watch, counters, gauges, problems, requests

METRICS = """
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 40.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 3.0
vllm:request_success_created{engine="0",finished_reason="length",model_name="m"} 1.7e+09
"""


def test_metrics_are_read() -> None:
    assert gauges(METRICS) == {"running": 2, "waiting": 1, "kv_cache_usage": 0.25}
    assert counters(METRICS) == {
        "finished_length": 40,
        "finished_stop": 1,
        "finished_abort": 3,
        "finished_error": 0,
        "generation_tokens": 1200,
    }


def test_requests_are_of_all_kinds_and_follow_their_seed() -> None:
    made = list(requests(1000, 3))
    assert made == list(requests(1000, 3))
    assert made != list(requests(1000, 4))
    assert all(1 <= len(each.prompt) + each.tokens <= 512 for each in made)
    lengths = [len(each.prompt) for each in made]
    assert min(lengths) <= 2
    assert max(lengths) > 256
    for stream in (True, False):
        broken_off = [
            each for each in made if each.stream == stream and each.give_up is not None
        ]
        assert len(broken_off) > 50
    assert not any(each.give_up for each in made if each.probe)
    assert 1 < len({each for each in made if each.probe}) < 10


class FakeServer:
    class plan:
        url = "http://127.0.0.1:1"
        model = "m"


@pytest.mark.parametrize(
    ("outcome", "tokens", "noted"),
    [
        ("completed", [1, 2], "completed"),
        ("completed", [1], "failed"),
        ("completed", [1, 3], "failed"),
        ("aborted", [1], "aborted"),
        ("HTTP 500: b''", [], "failed"),
    ],
)
def test_answers_are_looked_at(outcome: str, tokens: list[int], noted: str) -> None:
    clients = Clients(FakeServer())  # type: ignore[arg-type]
    request = Request((5,), 2, stream=False, probe=True)
    clients.note(request, "completed", [1, 2])
    clients.note(request, outcome, tokens)
    assert clients.outcomes[noted] == (2 if noted == "completed" else 1)
    assert len(clients.failures) == (noted == "failed")


def test_growth_is_counted_from_the_warm_up_on() -> None:
    watch = Watch({})
    for answered, mib in ((50, 100.0), (100, 300.0), (150, 305.0), (200, 310.5)):
        watch.samples.append((answered, {"ffn": {"worker": mib}}))
    assert watch.growth(100) == {"ffn": {"worker": 10.5}}


def good() -> dict[str, Any]:
    return {
        "requests": 10,
        "outcomes": {"completed": 7, "aborted": 3, "failed": 0},
        "failures": [],
        "tokens_received": 100,
        "counters": {
            "finished_length": 8,
            "finished_stop": 0,
            "finished_abort": 1,
            "finished_error": 0,
            "generation_tokens": 110,
        },
        "gauges_in_the_end": {"running": 0.0},
        "drained": True,
        "broken_off": {"asked": 400, "made": 12, "drained": True},
        "healthy_in_the_end": True,
        "exit_status": {"attention": 0, "ffn": 0},
        "growth_bound_mib": 32,
        "growth_mib": {"ffn": {"worker": 32.0}},
    }


def test_a_good_result_has_no_problem() -> None:
    assert not problems(good())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"failures": ["HTTP 500"]}, "Failed: HTTP 500"),
        ({"outcomes": {"completed": 6, "aborted": 3, "failed": 0}}, "missing"),
        ({"outcomes": {"completed": 9, "aborted": 1, "failed": 0}}, "8 requests"),
        ({"requests": 8}, "More was counted"),
        ({"tokens_received": 111}, "110 tokens"),
        ({"drained": False}, "Work is left"),
        ({"broken_off": {"asked": 400, "made": 300, "drained": True}}, "went on"),
        ({"healthy_in_the_end": False}, "healthy"),
        ({"exit_status": {"attention": 0, "ffn": None}}, "status None"),
        ({"growth_mib": {"ffn": {"worker": 33.0}}}, "ffn, worker: grew by 33.0 MiB"),
    ],
)
def test_problems_are_named(change: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems(good() | change))
