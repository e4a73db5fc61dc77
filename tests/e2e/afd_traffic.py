"""Seeded requests to a server, and whether its answers are the expected ones."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from afd_pairs import Model
from afd_servers import AFDServer
from compare import difference
from jobs import WORKLOADS, Jobs, expected

from tools.stream import lines_of

# Requests of these are mixed.
SOURCES = ("shared-1", "mixed", "chunked", "random-5", "random-6", "random-9")
AT_ONCE = 12


@dataclass(frozen=True)
class Request:
    """One prompt of a workload.

    Attributes:
        source: Name of the workload.
        index: Of the prompt there.
        stream: Whether its completion is streamed.
    """

    source: str
    index: int
    stream: bool

    @property
    def body(self) -> dict[str, Any]:
        spec = WORKLOADS[self.source].spec()
        return {
            "prompt": spec["prompts"][self.index],
            "max_tokens": spec["max_tokens"][self.index],
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
            "stream": self.stream,
        }

    def send(self, server: AFDServer, rank: int | None = None) -> dict[str, Any]:
        """Tokens and logprobs.

        Args:
            server: Who is asked.
            rank: Data parallel rank that is to answer.
        """
        choices = ask(server, "/v1/completions", self.body, rank)
        found = [choice["logprobs"] for choice in choices]
        return {
            "tokens": [as_id(token) for each in found for token in each["tokens"]],
            "logprobs": [
                {as_id(token): value for token, value in row.items()}
                for each in found
                for row in each["top_logprobs"]
            ],
        }


def as_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def ask(
    server: AFDServer, path: str, body: dict[str, Any], rank: int | None = None
) -> list[dict[str, Any]]:
    """First choices of the answer: one, or as many as were streamed."""
    body = {"model": server.model} | body
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    if not body["stream"]:
        return [server.post(path, body, headers)["choices"][0]]
    with server.client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in lines_of(answer.iter_bytes()) if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def mixed_requests(count: int, seed: int) -> list[Request]:
    """Prompts of all lengths, every second one streamed."""
    rng = random.Random(seed)
    all_of_them = [
        (source, index)
        for source in SOURCES
        for index in range(len(WORKLOADS[source].prompts))
    ]
    return [
        Request(source, index, stream=at % 2 == 0)
        for at, (source, index) in enumerate(rng.sample(all_of_them, count))
    ]


def put_together(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: [each[key] for each in results] for key in ("tokens", "logprobs")}


def check_traffic(
    server: AFDServer, model: Model, jobs: Jobs, requests: list[Request]
) -> None:
    """A few requests one by one, all the others at once as far as the server goes."""
    got = [request.send(server) for request in requests[:4]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        got += pool.map(lambda request: request.send(server), requests[4:])
    check_answers(got, model, jobs, requests)


def check_answers(
    got: list[dict[str, Any]], model: Model, jobs: Jobs, requests: list[Request]
) -> None:
    """They are those of the reference, request by request."""
    wanted = []
    for request in requests:
        result = expected(jobs, model.name, request.source)
        wanted.append(
            {key: result[key][request.index] for key in ("tokens", "logprobs")}
        )
    found = difference(put_together(wanted), put_together(got))
    assert found.equal, (
        found,
        [requests[at[0]] for at in (found.token, found.at) if at],
    )
