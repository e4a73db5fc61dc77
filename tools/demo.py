"""Runs both AFD roles, asks them for completions, and compares with one vLLM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tools import serve, timeline
from tools.env import clean_environ, shell_line
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.process import die_with_parent, free_ports
from tools.serve_afd import prepare, role_plan, with_tree
from tools.supervise import kill_session, sigterm_interrupts
from tools.trace import summarise
from tools.ui import console, say, step

START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
_PROGRESS_S = 10
_TAIL = 25

# So that equal means equal: sums in bf16 differ between batch sizes.
_TINY_FLAGS = ("--dtype", "float32", "--seed", "0")

NO_TRACE = "This vLLM writes no traces: the patch afd-trace is not in it."

# What the attention role counts; labels are summed up.
_COUNTERS = {
    "steps": "vllm:dbo_steps_total",
    "split_steps": "vllm:dbo_split_steps_total",
    "exchanges": "vllm:afd_exchanges_total",
    "exchanges_overlapped": "vllm:afd_exchanges_overlapped_total",
    "bytes": "vllm:afd_bytes_total",
    "wait_s": "vllm:afd_step_wait_seconds_sum",
}


@dataclass(frozen=True)
class Request:
    """A completion to ask for.

    Attributes:
        prompt: Its text.
        max_tokens: How many tokens to make.
        stream: Whether to have them sent one by one.
    """

    prompt: str
    max_tokens: int = 12
    stream: bool = False


_STORY = "The scheduler cuts a step in two, and each half waits for the other. "

# Title and requests; those of a round are sent at the same time.
ROUNDS: tuple[tuple[str, tuple[Request, ...]], ...] = (
    ("short, one alone", (Request("Two batches"),)),
    ("long, one alone", (Request(_STORY * 12),)),
    (
        "concurrent",
        tuple(Request(f"{n}. " + _STORY[: 7 * n], 8 + n % 3) for n in range(1, 7)),
    ),
    (
        "streamed, with a long one",
        (
            Request("Tell me token by token", 12, stream=True),
            Request(f"And also: {_STORY * 5}", 12),
        ),
    ),
)


class Server:
    """A server in a session of its own, with its output in a log.

    Args:
        name: `attention`, `ffn` or `monolithic`.
        plan: What to run.
        log: File for its output.
    """

    def __init__(self, name: str, plan: serve.Plan, log: Path) -> None:
        self.name = name
        self.plan = plan
        self.log = log
        self.healthy = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            try:
                self.process = subprocess.Popen(
                    plan.command,
                    env=clean_environ() | plan.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise WorkshopError(
                    f"{plan.command[0]} cannot be run.", str(error), "Run `make build`."
                ) from None

    def check_health(self) -> bool:
        """Whether it answers that it is healthy.

        Raises:
            WorkshopError: It has ended.
        """
        if (code := self.process.poll()) is not None:
            raise self.error(f"The {self.name} server ended with status {code}.")
        if not self.healthy:
            try:
                with _open(f"{self.plan.url}/health", timeout=5):
                    self.healthy = True
            except OSError:
                pass
        return self.healthy

    def complete(self, request: Request) -> list[int]:
        """Greedy tokens of a completion.

        Raises:
            WorkshopError: It was refused, or broke off.
        """
        body = {
            "model": self.plan.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": request.stream,
        }
        url = f"{self.plan.url}/v1/completions"
        tokens: list[int] = []
        try:
            with _open(url, REQUEST_TIMEOUT_S, json.dumps(body).encode()) as answer:
                for part in _parts(answer, request.stream):
                    tokens += part["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")
            raise self.error(f"A completion got HTTP {error.code}: {why}") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise self.error(f"A completion failed: {error!r}") from None
        if len(tokens) != request.max_tokens:
            raise self.error(
                f"A completion has {len(tokens)} of {request.max_tokens} tokens."
            )
        return tokens

    def counters(self) -> dict[str, float]:
        """Those of `_COUNTERS` that `/metrics` has."""
        try:
            with _open(f"{self.plan.url}/metrics", timeout=10) as answer:
                text = answer.read().decode(errors="replace")
        except OSError:
            return {}
        found: dict[str, float] = {}
        for key, name in _COUNTERS.items():
            pattern = rf"^{re.escape(name)}(?:\{{.*\}})? ([-+.\deE]+)"
            if values := re.findall(pattern, text, re.MULTILINE):
                found[key] = sum(map(float, values))
        return found

    def version(self) -> str:
        try:
            with _open(f"{self.plan.url}/version", timeout=10) as answer:
                return json.load(answer)["version"]
        except (OSError, ValueError, LookupError, TypeError):
            return "unknown"

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """What it logged last, without process, time and place."""
        logged = re.findall(r"[A-Z]+ [-\d]+ [:\d]+ \[.+?\] (.+)", self.text())
        return logged[-1][:70] if logged else "no output yet"

    def stop(self) -> int | None:
        """End it as a user does, and leave nothing of it.

        Returns:
            Its exit status; None if it had to be killed.
        """
        code = None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_session(self.process.pid)
            self.process.wait()
        return code

    def error(self, what: str) -> WorkshopError:
        tail = "\n".join(self.text().splitlines()[-_TAIL:])
        return WorkshopError(what, tail, f"The whole log is {self.log}.")


def demo(
    layout: Layout,
    model: str | None = None,
    arguments: Sequence[str] = (),
    tree: Path | None = None,
) -> dict[str, Any]:
    """Run the demo on what is built; print tables; write the report.

    Returns:
        The report.

    Raises:
        WorkshopError: A server did not start, or a request failed.
    """
    folder = layout.build / "demo"
    traces = _trace_folder(layout, folder, tree)
    plans = _plans(layout, model, arguments, tree, traces)
    seconds: dict[str, float] = {}

    with _servers() as servers:
        say("==> The same by hand, each in a shell of its own:")
        for role in ("ffn", "attention"):
            say(shell_line(plans[role].env, plans[role].command))
            servers.append(Server(role, plans[role], folder / f"{role}.log"))
        ffn, attention = servers
        with _timed(seconds, "afd_start", "Starting the FFN and the attention role"):
            wait_healthy(servers)
        version = attention.version()
        before = attention.counters()
        with _timed(seconds, "afd_requests", "Asking the attention role"):
            answers = ask(attention)
        after = attention.counters()
        with _timed(seconds, "afd_stop", "Stopping both"):
            codes = {each.name: each.stop() for each in (attention, ffn)}
        seen = {key: after[key] - before.get(key, 0) for key in after}
        seen = {k: v if k == "wait_s" else round(v) for k, v in seen.items()}

    with _servers() as servers:
        plan = plans["monolithic"]
        servers.append(Server("monolithic", plan, folder / "monolithic.log"))
        with _timed(seconds, "monolithic_start", "Starting one vLLM with both"):
            wait_healthy(servers)
        with _timed(seconds, "monolithic_requests", "Asking it the same"):
            expected = ask(servers[0])

    differing = [
        title
        for title, requests in ROUNDS
        if any(answers[each] != expected[each] for each in requests)
    ]
    report: dict[str, Any] = {
        "format": 2,
        "version": version,
        "model": plans["attention"].model,
        "tokens_equal": not differing,
        "differing": differing,
        "requests": len(answers),
        "tokens": sum(map(len, answers.values())),
        **{key: seen.get(key) for key in _COUNTERS},
        **_timeline(layout, traces, folder),
        "exit_status": codes,
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
        "commands": {
            name: shell_line(each.env, each.command) for name, each in plans.items()
        },
    }
    _show(report, answers)
    file = folder / "report.json"
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    say(f"==> Report and logs are in {layout.relative(folder)}/.")
    return report


def problems(report: Mapping[str, Any]) -> list[str]:
    """What in a report is not as it should be."""
    found = []
    if not report["tokens_equal"]:
        found.append(f"Tokens differ: {', '.join(report['differing'])}.")
    if report["split_steps"] is None:
        found.append("The attention role did not say how many steps were split.")
    elif not report["split_steps"]:
        found.append("No step was split in two.")
    if early := report.get("received_early"):
        found.append(f"{early} exchanges were received before they were sent.")
    found += [
        f"The {name} server had to be killed."
        for name, code in report["exit_status"].items()
        if code is None
    ]
    return found


def ask(server: Server) -> dict[Request, list[int]]:
    """Tokens for each request of `ROUNDS`."""
    answers: dict[Request, list[int]] = {}
    for title, requests in ROUNDS:
        start = time.monotonic()
        with ThreadPoolExecutor(len(requests)) as pool:
            for each, tokens in zip(
                requests, pool.map(server.complete, requests), strict=True
            ):
                answers[each] = tokens
        say(f"    {title}: {time.monotonic() - start:.1f} s")
    return answers


def wait_healthy(servers: Sequence[Server], limit: float = START_TIMEOUT_S) -> None:
    """Wait until all answer, and say now and then what they are at.

    Raises:
        WorkshopError: One has ended, or is not healthy in time.
    """
    start = shown = time.monotonic()
    while True:
        # All are asked, also if one is not ready: any of them may have ended.
        ready = [each.check_health() for each in servers]
        if all(ready):
            return
        now = time.monotonic()
        if now - start > limit:
            late = next(each for each in servers if not each.healthy)
            raise late.error(f"The {late.name} server is not up after {limit:.0f} s.")
        if now - shown >= _PROGRESS_S:
            shown = now
            for each in servers:
                doing = "up" if each.healthy else each.last_line()
                say(f"    {now - start:3.0f} s  {each.name}: {doing}")
        time.sleep(0.2)


def _trace_folder(layout: Layout, folder: Path, tree: Path | None) -> Path | None:
    """An empty folder for the traces of both roles; None if they write none."""
    module = Path("vllm/distributed/afd_transfer/trace.py")
    if not ((tree or layout.tree) / module).exists():
        return None
    traces = folder / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    for old in traces.glob("*.jsonl"):
        old.unlink()
    return traces


def _timeline(layout: Layout, traces: Path | None, folder: Path) -> dict[str, Any]:
    """Make the timeline of what both roles traced, and say what it tells."""
    if traces is None:
        say(f"==> No timeline: {NO_TRACE}")
        return {
            "timeline": None,
            "overlap_efficiency": None,
            "overlap_efficiency_reason": NO_TRACE,
        }
    files = timeline.newest(traces)
    session, outputs = timeline.make(layout, files, folder)
    summary = summarise(session)
    overlap = summary.overlap
    return {
        "traces": [layout.relative(path) for path in files],
        "timeline": layout.relative(outputs.page),
        "received_early": summary.early,
        "both_compute": overlap and overlap.both / overlap.measured,
        "schedule_efficiency": overlap and overlap.schedule_efficiency,
        "overlap_efficiency": overlap and overlap.overlap_efficiency,
        "overlap_efficiency_reason": timeline.describe_overlap(overlap)[-1],
    }


def _plans(
    layout: Layout,
    model: str | None,
    arguments: Sequence[str],
    tree: Path | None,
    traces: Path | None = None,
) -> dict[str, serve.Plan]:
    """The three servers, on ports that are free."""
    given = serve.given_flags(arguments)
    if clash := {"port", "host", "afd-config", "config"} & given:
        raise WorkshopError(
            f"The demo sets --{min(clash)} itself.",
            todo="Leave it out, or run the roles with `make serve-afd`.",
        )
    if model is None and not {"dtype", "seed"} & given:
        arguments = (*_TINY_FLAGS, *arguments)
    ports = free_ports(4)
    plans = {
        role: role_plan(layout, role, model, port, arguments, ports[3], tree, traces)
        for role, port in zip(("ffn", "attention"), ports, strict=False)
    }
    defaults = [flag for flag in serve.DEFAULTS if "dbo" not in flag[0]]
    monolithic = serve.plan(layout, model, ports[2], arguments, defaults=defaults)
    return plans | {"monolithic": with_tree(monolithic, tree)}


def _show(report: Mapping[str, Any], answers: Mapping[Request, list[int]]) -> None:
    from rich.table import Table

    table = Table("round", "requests", "tokens", "equal", title="AFD against one vLLM")
    for title, requests in ROUNDS:
        table.add_row(
            title,
            str(len(requests)),
            str(sum(len(answers[each]) for each in requests)),
            "NO" if title in report["differing"] else "yes",
        )
    console(stderr=False).print(table)

    def shown(key: str, unit: str = "", scale: float = 1) -> str:
        value = report[key]
        return "not known" if value is None else f"{value / scale:,.6g}{unit}"

    facts = Table("attention role", "", title="What it exchanged")
    facts.add_row("steps", shown("steps"))
    facts.add_row("of them split in two", shown("split_steps"))
    facts.add_row("exchanges (a layer of a stage)", shown("exchanges"))
    facts.add_row("  answered when it looked", shown("exchanges_overlapped"))
    facts.add_row("sent and received", shown("bytes", " MiB", 2**20))
    facts.add_row("waited for the FFN role", shown("wait_s", " s"))
    for key, title in (
        ("both_compute", "split steps: both roles compute"),
        ("schedule_efficiency", "split steps: schedule efficiency"),
        ("overlap_efficiency", "overlap_efficiency"),
    ):
        value = report.get(key)
        facts.add_row(title, "not known" if value is None else f"{value:.0%}")
    console(stderr=False).print(facts)


def _parts(answer: Any, stream: bool) -> Iterator[dict[str, Any]]:
    if not stream:
        yield json.load(answer)
        return
    for raw in answer:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise ValueError("the stream broke off")


def _open(url: str, timeout: float, body: bytes | None = None) -> Any:
    """Ask a server on this machine; no proxy of the user is in the way."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json"}
    return opener.open(urllib.request.Request(url, body, headers), timeout=timeout)


@contextmanager
def _servers() -> Iterator[list[Server]]:
    """A list of servers; those that still run in the end are stopped."""
    servers: list[Server] = []
    try:
        yield servers
    finally:
        for each in reversed(servers):
            each.stop()


@contextmanager
def _timed(seconds: dict[str, float], key: str, title: str) -> Iterator[None]:
    start = time.monotonic()
    with step(title):
        yield
    seconds[key] = time.monotonic() - start


@click.command()
@click.option("--model", help="Path or name of a MoE model (default: a tiny one).")
@click.option(
    "--tree",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Source tree of vLLM to serve from; nothing is applied or built then.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    layout: Layout, model: str | None, tree: Path | None, arguments: tuple[str, ...]
) -> None:
    """Run both AFD roles on this machine and compare them with one vLLM.

    ARGUMENTS after `--` are passed to all three `vllm serve`. Writes
    build/demo/report.json, the roles' traces and their timeline.
    """
    with sigterm_interrupts():
        prepare(layout, model, tree)
        report = demo(layout, model, arguments, tree)
    if found := problems(report):
        raise WorkshopError("The demo did not show what it should.", "\n".join(found))
    say("==> Same tokens, with and without AFD.")
