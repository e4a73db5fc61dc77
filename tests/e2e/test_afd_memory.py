"""Each role has in memory what it runs: that is what disaggregation is for.

Sizes are of the worker processes of real servers, of a checkpoint that is mostly
experts, against one server that does all.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import sides
from afd_servers import AFDPair, Spec
from servers import Server

from tools import checkpoint, process
from tools.layout import Layout

MODEL = "bulky-qwen3-moe"
MIB = 1 << 20
# `VLLM_CPU_KVCACHE_SPACE=1`; the FFN role has none.
KV_CACHE = 1024 * MIB
# What the sizes of two equal processes may differ by.
NOISE = 64 * MIB


@dataclass(frozen=True)
class Memory:
    """Bytes of a process.

    Attributes:
        peak: The most that was resident, what is mapped from files included.
        own: Resident now, without what is mapped from files.
    """

    peak: int
    own: int

    @classmethod
    def of(cls, server: Server) -> Memory:
        worker = process.family(server.process.pid).get("worker", server.process.pid)
        return cls(process.memory(worker, "VmHWM"), process.memory(worker, "RssAnon"))


@pytest.fixture(scope="module")
def experts() -> int:
    config = checkpoint.RECIPES[MODEL].config
    each = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 4
    return each * config["num_experts"] * config["num_hidden_layers"]


@pytest.fixture(scope="module")
def memory(layout: Layout) -> dict[str, Memory]:
    """By role, and of the server that does all: `whole`."""
    side = sides.patched(layout)
    model = checkpoint.ensure(layout, MODEL, side.python)
    folder = layout.reports / "e2e" / "afd-memory"
    found = {}
    whole = Server(side, "v2", model, folder)
    try:
        whole.wait_ready()
        prompt = list(range(100))
        expected = whole.complete(prompt)
        found["whole"] = Memory.of(whole)
    finally:
        whole.stop()
    spec = Spec(side, model, folder, config={"heartbeat_timeout_s": 60})
    with AFDPair(spec) as pair:
        assert pair.attention.complete(prompt)["tokens"] == expected["tokens"]
        for role, server in pair.servers.items():
            found[role] = Memory.of(server)
    return found


def test_attention_never_has_the_experts(
    memory: dict[str, Memory], experts: int
) -> None:
    attention, whole = memory["attention"], memory["whole"]
    # Also not while it loads.
    assert attention.peak < whole.peak - experts + NOISE
    assert attention.own < whole.own - experts + NOISE


def test_ffn_has_little_but_the_experts(
    memory: dict[str, Memory], experts: int
) -> None:
    ffn, attention = memory["ffn"], memory["attention"]
    assert ffn.own < attention.own - KV_CACHE + experts + NOISE
    # While it loads, the checkpoint's experts are mapped too.
    assert ffn.peak < ffn.own + experts + NOISE
