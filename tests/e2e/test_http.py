"""Two real servers and the same traffic over HTTP."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from compare import ambiguous, difference
from pairs import Pair
from servers import Server

from tools.stream import lines_of


def traffic(server: Server) -> dict[str, Any]:
    """Seeded requests, first one by one, then many at a time."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(256) for _ in range(length)]
        for length in (1, 2, 15, 16, 17, 33, 63, 64, 101, 200, 7, 5, 90, 3, 150, 40)
    ]
    answers = [server.complete(prompt) for prompt in prompts[:6]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers += pool.map(server.complete, prompts)
        answers += pool.map(server.complete, reversed(prompts))
    return {key: [answer[key] for answer in answers] for key in ("tokens", "logprobs")}


def test_same_tokens_and_logprobs_over_http(pair: Pair) -> None:
    pair.dbo.watched_steps()
    expected, got = pair.both(traffic)
    assert not ambiguous(expected)
    found = difference(expected, got)
    assert found.equal, found
    steps = pair.dbo.watched_steps()
    split = [step for step in steps if step["slices"]]
    assert all(len(step["ran"]) == 2 for step in split)
    assert len([step for step in split if not step["prefill"]]) >= 5
    assert len([step for step in split if step["prefill"]]) >= 5
    assert all(
        bool(step["slices"]) == (sum(step["tokens"]) >= (16 if step["prefill"] else 2))
        for step in steps
    )


def test_the_server_without_dbo_does_not_split(pair: Pair) -> None:
    pair.expected.watched_steps()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(pair.expected.complete, [[7] * 20, [8] * 20, [9] * 40]))
    steps = pair.expected.watched_steps()
    assert steps
    assert not any(step["slices"] for step in steps)


def chat(server: Server, stream: bool = False) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": "Do two batches overlap?"}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def test_chat_completions(pair: Pair) -> None:
    def ask(server: Server) -> str:
        answer = server.post("/v1/chat/completions", chat(server))
        assert answer["usage"]["completion_tokens"] == 8
        return answer["choices"][0]["message"]["content"]

    expected, got = pair.both(ask)
    assert got == expected


def test_streamed_chat_gives_the_same_text(pair: Pair) -> None:
    whole = pair.dbo.post("/v1/chat/completions", chat(pair.dbo))
    pieces = []
    with pair.dbo.client.stream(
        "POST", "/v1/chat/completions", json=chat(pair.dbo, stream=True)
    ) as answer:
        assert answer.status_code == 200
        lines = [line for line in lines_of(answer.iter_bytes()) if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            pieces.append(choice["delta"].get("content") or "")
    assert len(pieces) > 2
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


# What a request may ask for besides greedy tokens; each has one right answer.
FIXED = {
    "penalties": {
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "logit_bias": {"logit_bias": {"65": 50, "66": 40}},
    "allowed_token_ids": {"allowed_token_ids": [65, 66, 67]},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "regex": {"structured_outputs": {"regex": "[0-9]{6}"}},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
}
RANDOM = {
    "default": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "several": {"n": 2, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
}


def ask_at_once(server: Server, bodies: list[dict[str, Any]]) -> list[list[str]]:
    """Texts of each answer; the requests share steps, which are split."""

    def ask(body: dict[str, Any]) -> list[str]:
        common = {"model": server.model, "prompt": "Two batches", "max_tokens": 8}
        answer = server.post("/v1/completions", common | {"ignore_eos": True} | body)
        return [choice["text"] for choice in answer["choices"]]

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def test_sampling_parameters_act_as_without_dbo(pair: Pair) -> None:
    bodies = [{"temperature": 0} | body for body in FIXED.values()]
    expected, got = pair.both(lambda server: ask_at_once(server, bodies))
    assert dict(zip(FIXED, got, strict=True)) == dict(zip(FIXED, expected, strict=True))


def test_random_sampling_follows_its_seed(pair: Pair) -> None:
    """A request without a temperature is a random one."""
    bodies = [body | {"seed": 7} for body in RANDOM.values()]
    first, second = (ask_at_once(pair.dbo, bodies) for _ in range(2))
    assert first == second
    other = ask_at_once(pair.dbo, [body | {"seed": 8} for body in RANDOM.values()])
    assert first != other
    ask_at_once(pair.dbo, [dict(body) for body in RANDOM.values()])


def test_the_log_says_that_dbo_is_on(pair: Pair) -> None:
    assert "Dual batch overlap is enabled" in pair.dbo.process.log.read_text()
    assert "Dual batch overlap is enabled" not in pair.expected.process.log.read_text()


def test_sigterm_ends_the_servers_and_leaves_nothing(pair: Pair) -> None:
    """The last test of a pair: it stops both servers."""
    for server in (pair.expected, pair.dbo):
        server.process.popen.terminate()
    for server in (pair.expected, pair.dbo):
        assert server.process.wait(60) is not None
        assert server.process.is_gone()
