# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What both AFD roles write of the steps that they run."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.v1.worker.afd_attention_model_runner import AFDAttention

from .test_afd_roles import (  # noqa: F401 (fixtures)
    HIDDEN_SIZE,
    NUM_LAYERS,
    TIMEOUT_S,
    Failures,
    Servers,
    run_ubatches,
    servers,
)

pytestmark = pytest.mark.skip_global_cleanup


class Trace:
    def __init__(self, folder: Path, role: str):
        (path,) = folder.glob(f"afd-{role}-*.jsonl")
        self.header, *lines = map(json.loads, path.read_text().splitlines())
        assert self.header["role"] == role
        assert lines.pop()["type"] == "end"
        self.events = [line for line in lines if line["type"] == "event"]
        self.steps = [line for line in lines if line["type"] == "step"]

    def names(self, seq: int, stage: int, layer: int) -> list[str]:
        return [
            e["event"]
            for e in self.events
            if (e["seq"], e["stage"], e["layer"]) == (seq, stage, layer)
        ]

    def one(self, event: str, seq: int, stage: int, layer: int) -> dict[str, Any]:
        (found,) = (
            e
            for e in self.events
            if (e["event"], e["seq"], e["stage"], e["layer"])
            == (event, seq, stage, layer)
        )
        return found


def _busy(trace: Trace) -> list[dict[str, Any]]:
    """What a role does with its thread; receives only go on beside it."""
    events = [e for e in trace.events if e["event"] in ("compute", "send", "wait")]
    return sorted(events, key=lambda e: (e["begin_ns"], e["end_ns"]))


def _check(attention: Trace, ffn: Trace, steps: list[tuple[str, list[int]]]) -> None:
    """What holds for any trace of both roles."""
    for trace in (attention, ffn):
        assert trace.header["layers"] == [f"layers.{i}" for i in range(NUM_LAYERS)]
        assert [(s["kind"], s["stage_tokens"]) for s in trace.steps] == steps
        assert [s["seq"] for s in trace.steps] == list(range(1, len(steps) + 1))
        for event in trace.events:
            step = trace.steps[event["seq"] - 1]
            assert event["begin_ns"] <= event["end_ns"]
            assert step["begin_ns"] <= event["begin_ns"]
            assert event["end_ns"] <= step["end_ns"]
            assert event["rows"] == step["stage_tokens"][event["stage"]]
        busy = _busy(trace)
        assert all(a["end_ns"] <= b["begin_ns"] for a, b in zip(busy, busy[1:]))
    for seq, (_, stage_tokens) in enumerate(steps, 1):
        for stage in range(len(stage_tokens)):
            handoff = ["yield"] if len(stage_tokens) > 1 else []
            for layer in range(NUM_LAYERS):
                at = seq, stage, layer
                assert attention.names(*at) == (
                    ["compute", "send", *handoff, "wait", "recv"]
                )
                assert ffn.names(*at) == ["wait", "recv", "compute", "send"]
                # Nothing is there before it was sent.
                for here, there in ((attention, ffn), (ffn, attention)):
                    sent, there_at = here.one("send", *at), there.one("recv", *at)
                    assert sent["begin_ns"] <= there_at["end_ns"]
            # After the last answer.
            assert attention.names(seq, stage, NUM_LAYERS) == ["compute"]


def test_steps_in_one_stage(servers: Servers, tmp_path: Path) -> None:  # noqa: F811
    servers.start_ffn(Failures(), trace_dir=str(tmp_path))
    attention = servers.connect(Failures(), trace_dir=str(tmp_path))
    sizes = [3, 0, 1]
    for size in sizes:
        servers.run_step(attention, size)
    servers.close()
    _check(
        Trace(tmp_path, "attention"),
        Trace(tmp_path, "ffn"),
        [("eager", [size]) for size in sizes],
    )


def test_steps_in_two_stages(
    servers: Servers,  # noqa: F811
    run_ubatches: Callable,  # noqa: F811
    tmp_path: Path,
) -> None:
    servers.start_ffn(Failures(), trace_dir=str(tmp_path))
    attention = servers.connect(Failures(), num_ubatches=2, trace_dir=str(tmp_path))
    # Long enough to be seen, and too long to hide: FFN is the slower role.
    servers.compute = lambda layer, x: time.sleep(0.02)
    steps = [("warmup", [5, 6]), ("eager", [0, 3])]
    for kind, tokens in steps:

        def run_stage(stage: int, tokens=tokens) -> None:
            x = torch.rand(tokens[stage], HIDDEN_SIZE)
            servers.run_model(attention, x)

        attention.begin_step(kind, tokens)
        run_ubatches(run_stage)
        attention.end_step()
    servers.run_step(attention, 4)
    servers.close()

    ours, theirs = Trace(tmp_path, "attention"), Trace(tmp_path, "ffn")
    _check(ours, theirs, [*steps, ("eager", [4])])
    for seq in (1, 2):
        sends = [e for e in ours.events if (e["event"], e["seq"]) == ("send", seq)]
        order = [(e["layer"], e["stage"]) for e in sends]
        assert order == [(n, stage) for n in range(NUM_LAYERS) for stage in (0, 1)]
        for layer in range(NUM_LAYERS):
            # The other stage sends while this one has yielded, and the answer to
            # this one is computed meanwhile.
            given = ours.one("yield", seq, 0, layer)
            other = ours.one("send", seq, 1, layer)
            assert given["begin_ns"] <= other["begin_ns"]
            assert other["end_ns"] <= given["end_ns"]
            expected = ours.one("recv", seq, 0, layer)
            computed = theirs.one("compute", seq, 0, layer)
            assert expected["begin_ns"] <= computed["end_ns"] <= expected["end_ns"]
            assert computed["end_ns"] - computed["begin_ns"] >= 20_000_000
            assert ours.one("wait", seq, 0, layer)["end_ns"] >= computed["end_ns"]


def test_a_step_that_fails(
    servers: Servers,  # noqa: F811
    run_ubatches: Callable,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its events are there, up to the failure; its end is not."""
    failures = Failures()
    servers.start_ffn(failures, trace_dir=str(tmp_path))
    attention = servers.connect(Failures(), num_ubatches=2, trace_dir=str(tmp_path))
    servers.run_step(attention, 2)

    def run_stage(stage: int) -> None:
        x = torch.rand(2, HIDDEN_SIZE)
        attention.exchange(0, x, servers.logits(x))
        raise MemoryError("no memory for stage 0")

    attention.begin_step("eager", [2, 2])
    with pytest.raises(RuntimeError, match="no memory for stage 0") as failed:
        run_ubatches(run_stage)
    attention.abort_step(failed.value)
    failures.wait()
    servers.close()
    for role in ("attention", "ffn"):
        trace = Trace(tmp_path, role)
        assert [step["seq"] for step in trace.steps] == [1]
        assert {event["seq"] for event in trace.events} == {1, 2}


def test_each_session_has_its_own(servers: Servers, tmp_path: Path) -> None:  # noqa: F811
    servers.start_ffn(Failures(), trace_dir=str(tmp_path))
    for _ in range(2):
        attention = servers.connect(Failures())
        assert attention.session.trace is None
        servers.run_step(attention, 2)
        attention.close()
    servers.close()
    assert len(list(tmp_path.glob("afd-ffn-*.jsonl"))) == 2
    assert not list(tmp_path.glob("afd-attention-*.jsonl"))


def test_the_peer_does_not_wait_for_the_disk(
    servers: Servers,  # noqa: F811
    tmp_path: Path,
) -> None:
    ffn = servers.start_ffn(Failures())
    attention: AFDAttention = servers.connect(Failures(), trace_dir=str(tmp_path))
    servers.run_step(attention, 2)
    trace, control = attention.session.trace, ffn._control
    assert trace is not None and control is not None
    close = trace.close
    said: list[bool] = []

    def stalled_close() -> None:
        said.append(control.peer_said_bye)
        close()

    trace.close = stalled_close  # type: ignore[method-assign]
    servers.close()
    assert said == [True]
    assert [step["seq"] for step in Trace(tmp_path, "attention").steps] == [1]


def test_a_trace_that_ends_early_is_no_harm(
    servers: Servers,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers.start_ffn(Failures(), trace_dir=str(tmp_path))
    attention: AFDAttention = servers.connect(Failures(), trace_dir=str(tmp_path))
    assert attention.session.trace is not None
    servers.run_step(attention, 2)
    attention.session.trace.close()
    attention.session.trace._writer.join(TIMEOUT_S)
    servers.run_step(attention, 2)
    servers.close()
    assert [step["seq"] for step in Trace(tmp_path, "attention").steps] == [1]
