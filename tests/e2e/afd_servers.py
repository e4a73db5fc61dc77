"""Pairs of real `vllm serve` with the AFD roles, on 127.0.0.1, a core each."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hosts import Host
from servers import Server, wait_ready
from sides import Side

from tools.env import disjoint_cores
from tools.errors import WorkshopError
from tools.process import descendants, family, free_ports

ROLES = ("attention", "ffn")
# Two servers of three processes each, which may have to share the cores with others.
START_TIMEOUT_S = 600

_OPTIONS = (
    "--host=127.0.0.1",
    "--dtype=float32",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--seed=0",
)


@dataclass(frozen=True)
class Ports:
    """Where the roles meet, and where each answers HTTP."""

    afd: int
    attention: int
    ffn: int

    @classmethod
    def free(cls) -> Ports:
        return cls(*free_ports(3))


@dataclass(frozen=True)
class Spec:
    """A pair of servers that can be started, also several times.

    Attributes:
        side: Whose vLLM.
        model: Folder of a checkpoint.
        folder: Where the logs are kept.
        options: Flags of `vllm serve` for both roles.
        attention_options: Flags of the attention role, such as `DBO_FLAGS`.
        config: Keys of `--afd-config` for both roles.
        attention_config: Keys that only the attention role gets.
        env: Further variables for both roles.
        ports: Free ones unless given.
        hosts: Where each role runs, if not beside the test.
    """

    side: Side
    model: Path
    folder: Path
    options: Sequence[str] = ()
    attention_options: Sequence[str] = ()
    config: dict[str, Any] = field(default_factory=dict)
    attention_config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    ports: Ports = field(default_factory=Ports.free)
    hosts: Mapping[str, Host] = field(default_factory=dict)

    def num_ranks(self, role: str) -> int:
        """Ranks of a role."""
        return self.config.get(f"num_{role}_ranks", 1)


class AFDServer(Server):
    """One role, started at once; `wait_ready` waits until it answers.

    Attributes:
        tmp: Its folder for temporary files, for sockets among them.

    Args:
        log_name: Name of its log, without the suffix; the role's unless given.
        port: HTTP port, if not that of `spec`.
    """

    start_timeout = START_TIMEOUT_S

    def __init__(
        self,
        spec: Spec,
        role: str,
        log_name: str | None = None,
        port: int | None = None,
    ) -> None:
        self.role = role
        self.host = spec.hosts.get(role)
        self.title = f"{role} server"
        config = {"afd_role": role, "afd_port": spec.ports.afd, **spec.config}
        if role == "attention":
            config |= spec.attention_config
        # The paths of sockets below it are limited to some 100 characters.
        self._tmp = tempfile.TemporaryDirectory(
            prefix=f"afd-{role[0]}-", ignore_cleanup_errors=True
        )
        self.tmp = Path(self._tmp.name)
        self._start(
            spec.side,
            spec.model,
            port or getattr(spec.ports, role),
            [
                f"--afd-config={json.dumps(config)}",
                *_OPTIONS,
                *spec.options,
                *(spec.attention_options if role == "attention" else ()),
            ],
            _environment(spec, role) | spec.env | {"TMPDIR": str(self.tmp)},
            spec.folder / f"{log_name or role}.log",
        )

    def text(self) -> str:
        """What it has logged."""
        return self.process.log.read_text(errors="replace")

    def family(self) -> dict[str, int]:
        """Its processes by what they are: `api`, `engine` and `worker`, so far."""
        return family(self.process.pid)

    def pids(self) -> list[int]:
        """All its processes, helpers of Python's multiprocessing among them."""
        return [self.process.pid, *descendants(self.process.pid)]

    def engines(self) -> list[int]:
        """Its engine processes, by data parallel rank, as far as they have started."""
        titles = {title(pid): pid for pid in self.pids()}
        return [titles[each] for each in sorted(titles) if "::EngineCore" in each]

    def workers(self) -> list[int]:
        """Likewise the workers of each engine."""
        return [
            pid
            for engine in self.engines()
            for pid in descendants(engine)
            if title(pid).startswith("VLLM::Worker")
        ]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over those of its labels that are not given."""
        text = self.client.get("/metrics").text
        given = "".join(rf'(?=.*\b{key}="{value}")' for key, value in labels.items())
        pattern = rf"^{re.escape(name)}(?:\{{{given}.*\}})? ([-+.\deE]+)$"
        values = re.findall(pattern, text, re.MULTILINE)
        if not values:
            raise AssertionError(f"There is no metric {name}.")
        return sum(map(float, values))

    def kill(self) -> None:
        """End all its processes at once."""
        self.client.close()
        self.process.kill()
        self._tmp.cleanup()

    def stop(self) -> int | None:
        code = super().stop()
        self._tmp.cleanup()
        return code


class AFDPair:
    """Both roles, started together; as a context, stopped in the end.

    Args:
        first: Role that is started first, when the order matters.
    """

    def __init__(self, spec: Spec, first: str = "ffn") -> None:
        self.spec = spec
        self.servers: dict[str, AFDServer] = {}
        try:
            for role in sorted(ROLES, key=lambda role: role != first):
                self.servers[role] = AFDServer(spec, role)
        except BaseException:
            self.kill()
            raise

    @property
    def attention(self) -> AFDServer:
        return self.servers["attention"]

    @property
    def ffn(self) -> AFDServer:
        return self.servers["ffn"]

    def other(self, role: str) -> AFDServer:
        """The peer of a role."""
        return self.servers[ROLES[1 - ROLES.index(role)]]

    def wait_ready(self) -> None:
        """Wait until both are healthy.

        Raises:
            RuntimeError: One ended, or is not healthy in time; has its log's end.
        """
        wait_ready(*self.servers.values(), timeout=START_TIMEOUT_S)

    def stop(self) -> dict[str, int | None]:
        """End both as a user does, attention first.

        Returns:
            Exit statuses; None for one that had to be killed.
        """
        return {
            role: self.servers[role].stop() for role in ROLES if role in self.servers
        }

    def kill(self) -> None:
        for server in self.servers.values():
            server.kill()

    def __enter__(self) -> AFDPair:
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()


def title(pid: int) -> str:
    """What a process calls itself; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").strip("\0 ")
    except OSError:
        return ""


def _environment(spec: Spec, role: str) -> dict[str, str]:
    env = spec.side.env("v2")
    # The attention role has to choose the runner by itself.
    del env["VLLM_USE_V2_MODEL_RUNNER"]
    try:
        cores = disjoint_cores(len(ROLES))[ROLES.index(role)]
    except WorkshopError:
        return env  # There is one core, which both have to share.
    # Each computes on one thread, so that every sum is taken in the same order. The
    # ranks of a role share its core, but those that wait for each other in a reduction
    # do so at full speed: they share theirs with the other role.
    core = [cores.split(",")[0]]
    if (size := spec.num_ranks("ffn")) > 1:
        core = [part.split(",")[0] for part in disjoint_cores(size)]
    bind = "|".join((core * spec.num_ranks(role))[: spec.num_ranks(role)])
    return env | {"VLLM_CPU_OMP_THREADS_BIND": bind}
