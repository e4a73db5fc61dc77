"""Real servers in every supported number of ranks: who answers, and who ends.

`make test-topology` runs it, and test_afd_topology.py, which has more about one (2A1F).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import sides
from afd_pairs import MODELS
from afd_servers import AFDPair, Spec
from afd_traffic import check_traffic, mixed_requests
from jobs import REFERENCE, Jobs
from servers import DBO_FLAGS

from tools.layout import Layout

MODEL = MODELS[0]
REQUESTS = 24
# From the loss of a process to the end of the last one, heartbeats included.
END_S = 60

pytestmark = [
    pytest.mark.skipif(
        "E2E_TOPOLOGY" not in os.environ, reason="`make test-topology` runs it"
    ),
    pytest.mark.engines(REFERENCE, model=MODEL.name),
    pytest.mark.timeout(900),
]


@dataclass(frozen=True)
class Topology:
    """How many of what.

    Attributes:
        engines: Data parallel size of the attention role.
        size: Tensor parallel size of both roles.
        gate: `gate_placement` of both roles.
        dbo: Whether steps are split.
        killed: Role and number of the worker that is killed in the end.
    """

    engines: int
    size: int
    gate: str = "auto"
    dbo: bool = True
    killed: tuple[str, int] = ("attention", 1)

    @property
    def ranks(self) -> int:
        return self.engines * self.size

    def __str__(self) -> str:
        parts = [f"{self.ranks}A{self.size}F", f"gate_{self.gate}"]
        parts += ["dbo"] * self.dbo
        return "-".join(parts)


TOPOLOGIES = (
    Topology(2, 1, dbo=False),
    Topology(2, 1, gate="attention"),
    Topology(1, 2),
    Topology(1, 2, dbo=False, killed=("ffn", 0)),
    Topology(1, 2, gate="attention", killed=("ffn", 1)),
    Topology(2, 2, killed=("attention", 3)),
    Topology(2, 2, gate="attention", dbo=False, killed=("ffn", 1)),
)


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=str)
def topology(request: pytest.FixtureRequest) -> Topology:
    return request.param


@pytest.fixture(scope="module")
def pair(layout: Layout, topology: Topology) -> Iterator[AFDPair]:
    side = sides.patched(layout)
    folder = layout.reports / "e2e" / "afd-topologies" / str(topology)
    spec = Spec(
        side,
        MODEL.folder(layout, side),
        folder,
        options=(
            "--max-num-batched-tokens=64",
            f"--tensor-parallel-size={topology.size}",
        ),
        attention_options=(
            *(DBO_FLAGS if topology.dbo else ()),
            f"--data-parallel-size={topology.engines}",
            "--api-server-count=1",
        ),
        config={
            "num_attention_ranks": topology.ranks,
            "num_ffn_ranks": topology.size,
            "gate_placement": topology.gate,
        },
    )
    with AFDPair(spec) as pair:
        yield pair


def test_same_tokens_and_logprobs_as_without_afd(
    pair: AFDPair, topology: Topology, jobs: Jobs
) -> None:
    check_traffic(pair.attention, MODEL, jobs, mixed_requests(REQUESTS, 0))
    for engine in range(topology.engines):
        labels = {"engine": str(engine)}
        assert pair.attention.metric("vllm:afd_exchanges_total", **labels) > 0
        split = pair.attention.metric("vllm:afd_split_steps_total", **labels)
        assert (split > 0) == topology.dbo
    text = pair.ffn.text()
    for rank in range(topology.ranks):
        assert f"AFD session with AFD attention peer (rank {rank})" in text


def test_a_killed_worker_ends_both_roles(pair: AFDPair, topology: Topology) -> None:
    """The last test of a pair."""
    pids = [*pair.attention.pids(), *pair.ffn.pids()]
    assert len(pair.attention.workers()) == topology.ranks
    assert len(pair.ffn.workers()) == topology.size
    role, number = topology.killed
    killed = pair.servers[role]
    os.kill(killed.workers()[number], 9)
    for server in (pair.attention, pair.ffn):
        server.process.wait(END_S)
        assert server.process.is_gone(), server.process.tail()
    assert not [pid for pid in pids if sides.is_alive(pid)]
    # The others may have been ended by their own server before they could say so.
    assert re.search(
        rf"ERROR .*AFD {role} peer \(rank \d\) at \S+ ", pair.other(role).text()
    )
