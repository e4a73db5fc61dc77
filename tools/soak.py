"""Sends many random requests to a pair of AFD servers, and watches what they use.

Run by `make soak`. Some requests are streamed, and of both kinds some are broken off.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tools import checkpoint, process
from tools.demo import Server, wait_healthy
from tools.env import shell_line
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.serve import Plan
from tools.serve_afd import prepare, role_plan
from tools.stream import lines_of
from tools.supervise import sigterm_interrupts
from tools.ui import say, step

REQUESTS = 2000
CLIENTS = 8
# Of each process, from the end of the warm-up on. What allocators keep differs by some
# MiB; 8 KiB that are kept of each request are as much in 1,000 requests.
GROWTH_MIB = 8
# Of the requests, for caches and pools to fill: with 2,000, that takes some 700.
WARM_UP = 0.5
_REQUEST_TIMEOUT_S = 300
_DRAIN_S = 60
_REPORTS = 20

# Few blocks, so that the warm-up has written each of them: memory is used from then on.
_FLAGS = (
    "--dtype",
    "float32",
    "--seed",
    "0",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "16",
    "--max-num-batched-tokens",
    "256",
    "--num-gpu-blocks-override",
    "80",
)
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        prompt: Its tokens.
        tokens: How many to make.
        stream: Whether to have them sent one by one.
        give_up: After so many chunks, or seconds if it is not streamed, the client
            breaks off; None if it waits for all.
        probe: Asked again and again, and always to be answered likewise.
    """

    prompt: tuple[int, ...]
    tokens: int
    stream: bool
    give_up: float | None = None
    probe: bool = False


def requests(count: int, seed: int) -> Iterator[Request]:
    """Random requests of all sizes that the server takes."""
    rng = random.Random(seed)
    probes = [
        Request(tuple(rng.randrange(256) for _ in range(length)), 8, stream, probe=True)
        for length, stream in ((1, True), (20, False), (90, True), (300, False))
    ]
    for _ in range(count):
        if rng.random() < 0.08:
            yield rng.choice(probes)
            continue
        stream = rng.random() < 0.6
        tokens = rng.choice((1, 2, 4, 8, 16, 32, 64))
        give_up: float | None = None
        if rng.random() < 0.3:
            give_up = rng.randrange(tokens) if stream else rng.uniform(0.01, 2)
        # As many short as long ones.
        length = round(2 ** rng.uniform(0, 8.6))
        prompt = tuple(rng.randrange(256) for _ in range(length))
        yield Request(prompt, tokens, stream, give_up)


class Clients:
    """Asks a server.

    Attributes:
        server: The attention role.
        outcomes: How many requests were `completed`, `aborted` or `failed`.
        received: Tokens of all answers.
        failures: What went wrong.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = f"{server.plan.url}/v1/completions"
        self.model = server.plan.model
        self.outcomes: Counter[str] = Counter()
        self.received = 0
        self.failures: list[str] = []
        self._answers: dict[Request, list[int]] = {}

    def ask(self, request: Request) -> tuple[str, list[int]]:
        """How a request ended, and its tokens."""
        import httpx  # from the built environment

        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": request.stream,
        }
        patience = None if request.stream else request.give_up
        tokens: list[int] = []
        try:
            with (
                httpx.Client(
                    timeout=patience or _REQUEST_TIMEOUT_S, trust_env=False
                ) as client,
                client.stream("POST", self.url, json=body) as answer,
            ):
                if answer.status_code != 200:
                    return f"HTTP {answer.status_code}: {answer.read()!r}", []
                if not request.stream:
                    tokens = _tokens(json.loads(answer.read()))
                    return "completed", tokens
                chunks = 0
                for line in lines_of(answer.iter_bytes()):
                    if line == "data: [DONE]":
                        return "completed", tokens
                    if line.startswith("data: "):
                        tokens += _tokens(json.loads(line.removeprefix("data: ")))
                        chunks += 1
                        if request.give_up is not None and chunks > request.give_up:
                            return "aborted", tokens
            return "the stream broke off", tokens
        except httpx.TimeoutException as error:
            return "aborted" if patience else f"{error!r}", tokens
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return f"{error!r}", tokens

    def note(self, request: Request, outcome: str, tokens: list[int]) -> None:
        """Count an answer, after a look at it."""
        self.received += len(tokens)
        if outcome == "completed":
            if len(tokens) != request.tokens:
                outcome = f"{len(tokens)} of {request.tokens} tokens"
            elif request.probe and self._answers.setdefault(request, tokens) != tokens:
                outcome = f"{tokens} now, {self._answers[request]} at first"
        if outcome not in ("completed", "aborted"):
            size = f"{len(request.prompt)} + {request.tokens} tokens"
            self.failures.append(f"{size}: {outcome}")
            outcome = "failed"
        self.outcomes[outcome] += 1


def _tokens(part: Mapping[str, Any]) -> list[int]:
    if "error" in part:
        raise ValueError(str(part["error"]))
    return part["choices"][0]["token_ids"]


def memory(server: Server) -> dict[str, float]:
    """Resident memory of a server's processes, in MiB, without files."""
    return {
        kind: round(process.memory(pid, "RssAnon") / 2**20, 1)
        for kind, pid in process.family(server.process.pid).items()
    }


def metrics(server: Server) -> str:
    import httpx  # from the built environment

    return httpx.get(f"{server.plan.url}/metrics", timeout=30, trust_env=False).text


def gauges(text: str) -> dict[str, float]:
    return {key: _sum(text, rf"{name}{{.*}}") for key, name in _GAUGES.items()}


def counters(text: str) -> dict[str, int]:
    """What attention counted."""
    found = {
        f"finished_{reason}": _sum(
            text, rf'vllm:request_success_total{{.*finished_reason="{reason}".*}}'
        )
        for reason in ("length", "stop", "abort", "error")
    }
    found["generation_tokens"] = _sum(text, r"vllm:generation_tokens_total{.*}")
    return {key: int(value) for key, value in found.items()}


def _sum(text: str, pattern: str) -> float:
    values = re.findall(rf"^{pattern} ([-+.\deE]+)$", text, re.MULTILINE)
    return sum(map(float, values))


@dataclass
class Watch:
    """Memory of both roles over time.

    Attributes:
        samples: Number of requests answered, and MiB by role and process.
    """

    servers: Mapping[str, Server]
    samples: list[tuple[int, dict[str, dict[str, float]]]] = field(default_factory=list)

    def sample(self, answered: int) -> dict[str, dict[str, float]]:
        now = {role: memory(server) for role, server in self.servers.items()}
        self.samples.append((answered, now))
        return now

    def growth(self, warm: int) -> dict[str, dict[str, float]]:
        """MiB by which each process has grown since `warm` requests were answered."""
        first = next(sample for answered, sample in self.samples if answered >= warm)
        last = self.samples[-1][1]
        return {
            role: {
                process: round(last[role][process] - mib, 1)
                for process, mib in processes.items()
            }
            for role, processes in first.items()
        }


def soak(
    layout: Layout, count: int, seed: int, tree: Path | None = None
) -> dict[str, Any]:
    """Run the requests; what was seen."""
    folder = layout.reports / "soak"
    ports = process.free_ports(3)
    plans = {
        role: role_plan(layout, role, None, port, _flags(role), ports[2], tree)
        for role, port in zip(("ffn", "attention"), ports, strict=False)
    }
    servers: dict[str, Server] = {}
    try:
        for role, plan in plans.items():
            servers[role] = Server(role, plan, folder / f"{role}.log")
        with step("Starting the FFN and the attention role"):
            wait_healthy(list(servers.values()), 600)
        attention = servers["attention"]
        clients = Clients(attention)
        watch = Watch(servers)
        start = time.monotonic()
        warm = max(1, round(count * WARM_UP))
        with step(f"Sending {count} requests, {CLIENTS} at a time"):
            _send(clients, watch, list(requests(count, seed)), warm)
        seconds = time.monotonic() - start
        drained, left = _drain(attention)
        watch.sample(count)
        counted = counters(metrics(attention))
        with step(f"Breaking off {CLIENTS} long requests"):
            wasted = _break_off(clients)
            unread = counters(metrics(attention))["generation_tokens"]
            wasted["made"] = unread - counted["generation_tokens"]
        dbo = attention.counters()
        healthy = all(server.check_health() for server in servers.values())
        with step("Stopping both"):
            codes = {role: servers[role].stop() for role in ("attention", "ffn")}
        said = re.findall(r"AFD: \d+ steps.*", attention.text())
    finally:
        for server in servers.values():
            server.stop()
    return {
        "format": 1,
        "requests": count,
        "seed": seed,
        "clients": CLIENTS,
        "outcomes": {
            key: clients.outcomes[key] for key in ("completed", "aborted", "failed")
        },
        "failures": clients.failures[:20],
        "tokens_received": clients.received,
        "counters": counted | {key: int(value) for key, value in dbo.items()},
        "gauges_in_the_end": left,
        "broken_off": wasted,
        "drained": drained,
        "healthy_in_the_end": healthy,
        "exit_status": codes,
        "attention_says": said[-1] if said else None,
        "seconds": round(seconds, 1),
        "warm_up_requests": warm,
        "growth_bound_mib": GROWTH_MIB,
        "growth_mib": watch.growth(warm),
        "memory_mib": [
            {"answered": answered, **sample} for answered, sample in watch.samples
        ],
        "servers": {role: _portable(layout, plan) for role, plan in plans.items()},
    }


def problems(result: Mapping[str, Any]) -> list[str]:
    """What in a result is not as it should be."""
    outcomes, counted = result["outcomes"], result["counters"]
    finished = counted["finished_length"] + counted["finished_stop"]
    found = [f"Failed: {failure}" for failure in result["failures"]]
    if not result["drained"]:
        found.append(f"Work is left: {result['gauges_in_the_end']}.")
    if sum(outcomes.values()) != result["requests"]:
        found.append(f"Answers are missing: {outcomes}.")
    if finished < outcomes["completed"]:
        found.append(f"{finished} requests were counted as finished.")
    # A request that is broken off may never have got to the engine.
    if finished + counted["finished_abort"] > result["requests"]:
        found.append(f"More was counted than was asked: {counted}.")
    if counted["finished_error"]:
        found.append(f"{counted['finished_error']} requests ended with an error.")
    if counted["generation_tokens"] < result["tokens_received"]:
        found.append(f"{counted['generation_tokens']} tokens were counted.")
    wasted = result["broken_off"]
    if not wasted["drained"] or wasted["made"] > wasted["asked"] / 4:
        found.append(f"Requests that were broken off went on: {wasted}.")
    if not result["healthy_in_the_end"]:
        found.append("A role was not healthy in the end.")
    found += [
        f"The {role} server ended with status {code}."
        for role, code in result["exit_status"].items()
        if code != 0
    ]
    found += [
        f"{role}, {process}: grew by {mib} MiB after the warm-up; "
        f"{result['growth_bound_mib']} are allowed."
        for role, processes in result["growth_mib"].items()
        for process, mib in processes.items()
        if mib > result["growth_bound_mib"]
    ]
    return found


def _portable(layout: Layout, server: Plan) -> str:
    """Its command, without this machine's paths."""
    env = {key: value for key, value in server.env.items() if key != "PYTHONPATH"}
    return shell_line(env, server.command).replace(f"{layout.root}/", "")


def _flags(role: str) -> tuple[str, ...]:
    if role == "attention":
        return _FLAGS
    # It has no KV cache.
    return _FLAGS[: _FLAGS.index("--num-gpu-blocks-override")]


def _send(clients: Clients, watch: Watch, wanted: list[Request], warm: int) -> None:
    every = max(1, len(wanted) // _REPORTS)
    start = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        pending: dict[Future[tuple[str, list[int]]], Request] = {
            pool.submit(clients.ask, request): request for request in wanted
        }
        try:
            for answered, future in enumerate(as_completed(pending), 1):
                clients.note(pending[future], *future.result())
                if answered % every and answered != warm:
                    continue
                now = watch.sample(answered)
                passed = time.monotonic() - start
                expected = passed / answered * len(wanted)
                rss = ", ".join(
                    f"{role} {sum(processes.values()):.0f} MiB"
                    for role, processes in now.items()
                )
                say(
                    f"    {answered}/{len(wanted)}, "
                    f"{clients.outcomes['aborted']} broken off, "
                    f"{clients.outcomes['failed']} failed; {rss}; "
                    f"{passed:.0f} s of about {expected:.0f}"
                )
                for server in watch.servers.values():
                    server.check_health()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _break_off(clients: Clients) -> dict[str, Any]:
    """Break off requests that have just begun."""
    tokens = 400
    wanted = [
        Request((at,) * 50, tokens, at % 2 == 0, give_up=1) for at in range(CLIENTS)
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = [outcome for outcome, _ in pool.map(clients.ask, wanted)]
    if set(outcomes) != {"aborted"}:
        raise WorkshopError("Requests could not be broken off.", ", ".join(outcomes))
    drained, _ = _drain(clients.server)
    return {"asked": tokens * len(wanted), "drained": drained}


def _drain(attention: Server) -> tuple[bool, dict[str, float]]:
    """Wait until nothing runs or waits, and no block of the cache is used."""
    deadline = time.monotonic() + _DRAIN_S
    while True:
        left = gauges(metrics(attention))
        if not any(left.values()):
            return True, left
        if time.monotonic() > deadline:
            return False, left
        time.sleep(0.5)


@click.command()
@click.option(
    "-n",
    "--requests",
    "count",
    type=click.IntRange(1),
    default=REQUESTS,
    show_default=True,
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--tree",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Source tree of vLLM to serve from; nothing is applied or built then.",
)
@click.pass_obj
def command(layout: Layout, count: int, seed: int, tree: Path | None) -> None:
    """Send many random requests to both AFD roles; see that nothing is kept.

    Memory is compared with that after half of them. With less than 1,000, pools may
    still be filling then.

    The result goes to bench/results/soak.json.
    """
    with sigterm_interrupts():
        prepare(layout, None, tree)
        checkpoint.ensure(layout)
        result = soak(layout, count, seed, tree)
    found = problems(result)
    file = layout.root / "bench" / "results" / "soak.json"
    result = {"command": f"make soak N={count}", "ok": not found, **result}
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"==> {result['outcomes']} in {result['seconds']} s.")
    say(f"==> MiB since the warm-up: {result['growth_mib']}.")
    if found:
        raise WorkshopError(
            "The soak found something.",
            "\n".join(found),
            f"The result is in {layout.relative(file)}.",
        )
