"""Real servers with the AFD roles: seeded traffic, and what each role answers.

What is expected of a prompt is what an engine without AFD and without DBO generates
for it in process, an unpatched one save for MLA (see test_afd_engine.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import sides
from afd_pairs import MODELS, Model, Program, Variant, afd_config
from afd_servers import AFDPair, AFDServer, Spec
from afd_traffic import ask, check_traffic, mixed_requests
from jobs import Jobs
from servers import DBO_FLAGS
from workloads import FULL

from tools import trace
from tools.checkpoint import RECIPES
from tools.layout import Layout

SERVED = [model for model in MODELS if model.shares_reference]
REQUESTS = 80


class Served:
    """A pair of servers, whose attention role can be another one in the end."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        side = sides.patched(layout)
        folder = layout.reports / "e2e" / "afd-http" / str(model)
        self.traces = folder / "traces"
        shutil.rmtree(self.traces, ignore_errors=True)
        self.traces.mkdir(parents=True)
        # MLA has no chunked prefill on a CPU; the others get prompts in chunks.
        budget = 512 if model.mla else 64
        self.spec = Spec(
            side,
            model.folder(layout, side),
            folder,
            options=("--max-model-len=512", f"--max-num-batched-tokens={budget}"),
            attention_options=DBO_FLAGS,
            # Not what these tests are about, and the machine may be busy.
            config={"heartbeat_timeout_s": 60, "trace_dir": str(self.traces)},
        )
        self.pair = AFDPair(self.spec)

    @property
    def attention(self) -> AFDServer:
        return self.pair.attention

    @property
    def ffn(self) -> AFDServer:
        return self.pair.ffn

    def restart_attention(self, options: tuple[str, ...]) -> None:
        """Stop the attention role and start one that has other options."""
        self.attention.stop()
        spec = replace(self.spec, attention_options=options)
        self.pair.servers["attention"] = AFDServer(
            spec, "attention", log_name="attention-without-dbo"
        )
        self.pair.wait_ready()


def parameters(models: list[Model]) -> Any:
    return [
        pytest.param(
            model,
            id=str(model),
            marks=[pytest.mark.engines(kind, model=model.name) for kind in model.kinds],
        )
        for model in models
    ]


@pytest.fixture(scope="module", params=parameters(SERVED))
def served(layout: Layout, request: pytest.FixtureRequest) -> Iterator[Served]:
    pair = Served(request.param, layout)
    try:
        pair.pair.wait_ready()
        yield pair
    finally:
        pair.pair.kill()


def test_same_tokens_and_logprobs_over_http(served: Served, jobs: Jobs) -> None:
    check_traffic(served.attention, served.model, jobs, mixed_requests(REQUESTS, 0))


def test_chat_gives_what_its_tokens_complete_to(served: Served) -> None:
    """Streamed or not."""
    messages = [{"role": "user", "content": "Do two roles make one model?"}]
    common = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    server = served.attention
    tokens = server.post("/tokenize", {"model": server.model, "messages": messages})
    (whole,) = ask(
        server,
        "/v1/completions",
        common | {"prompt": tokens["tokens"], "stream": False},
    )
    assert whole["text"]
    path, body = "/v1/chat/completions", common | {"messages": messages}
    (answer,) = ask(server, path, body | {"stream": False})
    assert answer["message"]["content"] == whole["text"]
    pieces = [
        choice["delta"].get("content") or ""
        for choice in ask(server, path, body | {"stream": True})
    ]
    assert len(pieces) > 2
    assert "".join(pieces) == whole["text"]


def test_both_roles_answer_what_an_operator_asks(served: Served) -> None:
    answers = {}
    for role, server in served.pair.servers.items():
        assert server.client.get("/health").status_code == 200
        metrics = server.client.get("/metrics")
        assert metrics.status_code == 200
        assert "process_cpu_seconds_total" in metrics.text
        answers[role] = server.client.get("/version").json()
    assert answers["attention"] == answers["ffn"]
    assert answers["ffn"]["version"]
    assert served.attention.metric("vllm:generation_tokens_total") > REQUESTS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_the_ffn_role_takes_no_requests(
    served: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer: httpx.Response = served.ffn.client.post(
        path, json={"model": served.ffn.model, "stream": stream} | body
    )
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["code"] == 501
    assert "'ffn'" in error["message"]
    assert "attention" in error["message"]


only_one_model = pytest.mark.parametrize(
    "served", parameters(SERVED if FULL else SERVED[:1]), indirect=True
)


@only_one_model
def test_a_second_attention_role_is_refused(served: Served, jobs: Jobs) -> None:
    """While the first goes on."""
    program = Program("afd-second-attention", served.spec.side)
    program.add(
        "second",
        served.spec.model,
        Variant("eager", False, False, not served.model.mla, "").options
        # As the pair has it: nothing else is to be the reason.
        | {"max_num_batched_tokens": 512 if served.model.mla else 64}
        | afd_config("attention", "auto", served.spec.ports.afd),
        kind="be_refused",
    )
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(program.run, served.layout.reports / "e2e" / "afd")
        check_traffic(served.attention, served.model, jobs, mixed_requests(20, 1))
        error = second.result()["engines"]["second"]["error"]
    assert error.startswith("AFDHandshakeError: ")
    assert "already serving" in error
    check_traffic(served.attention, served.model, jobs, mixed_requests(20, 2))
    assert served.ffn.is_healthy()


def counted(server: AFDServer) -> tuple[int, int, int]:
    """Steps, split steps and exchanges, which the attention role logs at its end."""
    pattern = r"AFD, whole session: (\d+) steps, (\d+) of them split, (\d+) exchanges"
    steps, split, exchanges = re.findall(pattern, server.text())[-1]
    return int(steps), int(split), int(exchanges)


def check_counted(server: AFDServer, model: Model, dbo: bool) -> None:
    steps, split, exchanges = counted(server)
    assert exchanges == number_of_layers(model) * (steps + split)
    assert (20 < split < steps) if dbo else (split == 0 and steps > 20)


def number_of_layers(model: Model) -> int:
    config = RECIPES[model.name].config
    return config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)


def check_traces(folder: Path, model: Model) -> None:
    """What both roles did, in each session, with their own clocks and words."""
    files = {
        role: sorted(
            map(trace.read, folder.glob(f"afd-{role}-*.jsonl")),
            key=lambda each: each.header["monotonic_ns"],
        )
        for role in trace.ROLES
    }
    assert files["attention"]
    for attention, ffn in zip(*files.values(), strict=True):
        session = trace.join(attention, ffn)
        assert session.notes == []
        summary = trace.summarise(session)
        steps = session.attention.steps
        split = sum(len(step.rows) == 2 for step in steps)
        assert [step.seq for step in session.ffn.steps] == [step.seq for step in steps]
        assert summary.exchanges == number_of_layers(model) * (len(steps) + split)
        assert summary.early == 0, "received before it was sent"
        for step in steps:
            check_order(session, step)
        if split:
            assert summary.overlap is not None
            assert summary.overlap.both > 0, "the roles never computed at once"


def check_order(session: trace.Session, step: trace.Step) -> None:
    """Send stage 0, yield, send stage 1, yield, and so on, layer by layer."""
    stages = range(len(step.rows))
    order = [(layer, stage) for layer in range(len(session.layers)) for stage in stages]
    for each in session.traces:
        events = [event for event in each.events if event.seq == step.seq]
        assert all(event.rows == step.rows[event.stage] for event in events)
        sends = [event for event in events if event.name == "send"]
        assert [(event.layer, event.stage) for event in sends] == order
        yields = {
            (event.layer, event.stage): event
            for event in events
            if event.name == "yield"
        }
        if each.role == "ffn" or len(stages) == 1:
            assert not yields
            continue
        assert set(yields) == set(order)
        for one, other in pairwise(sends):
            # The next to send is the other stage, within this one's yield.
            if one.layer == other.layer:
                given = yields[one.layer, one.stage]
                assert one.end <= given.begin <= other.begin
                assert other.end <= given.end


@only_one_model
def test_attention_without_dbo_follows_on_the_same_ffn_role(
    served: Served, jobs: Jobs
) -> None:
    with_dbo = served.attention
    served.restart_attention(options=())
    assert served.ffn.is_healthy()
    check_counted(with_dbo, served.model, dbo=True)
    check_traffic(served.attention, served.model, jobs, mixed_requests(40, 3))


def test_sigterm_ends_both_roles_and_leaves_nothing(served: Served) -> None:
    """The last test of a pair; attention has counted its steps then."""
    attention, ffn = served.attention, served.ffn
    dbo = "--enable-dbo" in attention.process.popen.args
    for server in (attention, ffn):
        server.process.popen.terminate()
        assert server.process.wait(60) == 0, server.process.tail()
        assert server.process.is_gone()
    check_counted(attention, served.model, dbo)
    check_traces(served.traces, served.model)
