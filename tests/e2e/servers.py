"""Real `vllm serve` processes on 127.0.0.1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from hosts import Host
from sides import Process, Side

from tools.process import free_ports

# Engine start takes 30 to 45 s on an idle core.
START_TIMEOUT_S = 240
REQUEST_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60

DBO_FLAGS = (
    "--enable-dbo",
    "--dbo-decode-token-threshold=2",
    "--dbo-prefill-token-threshold=16",
)

_EXTENSION = Path(__file__).with_name("extension")
_OPTIONS = (
    "--host=127.0.0.1",
    "--dtype=float32",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--seed=0",
    "--worker-extension-cls=step_recorder.StepRecorder",
)


class Server:
    """One server, started at once; `wait_ready` waits until it answers.

    Args:
        side: Whose vLLM.
        runner: Model runner, `v1` or `v2`.
        model: Folder of a checkpoint.
        folder: Where the log is kept.
        options: Further flags.
    """

    title = "server"
    start_timeout = START_TIMEOUT_S
    # Where it runs, if not beside the test.
    host: Host | None = None

    def __init__(
        self,
        side: Side,
        runner: str,
        model: Path,
        folder: Path,
        options: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        env = side.env(runner)
        path = [str(_EXTENSION), *filter(None, [env.get("PYTHONPATH")])]
        name = f"server-{model.name}-{side.name}-{runner}"
        self._start(
            side,
            model,
            port or free_ports(1)[0],
            [*_OPTIONS, *options],
            # The extra endpoint over which the recorder is asked.
            env | {"PYTHONPATH": ":".join(path), "VLLM_SERVER_DEV_MODE": "1"},
            folder / f"{name}{'-dbo' if '--enable-dbo' in options else ''}.log",
        )

    def _start(
        self,
        side: Side,
        model: Path,
        port: int,
        flags: Sequence[str],
        env: dict[str, str],
        log: Path,
    ) -> None:
        self.model = model.name
        self.port = port
        command = [
            str(side.python.with_name("vllm")),
            "serve",
            str(model),
            f"--served-model-name={self.model}",
            f"--port={port}",
            *flags,
        ]
        self.process = Process(
            self.host.command(command) if self.host else command, env, log
        )
        self.client = self.new_client(REQUEST_TIMEOUT_S)

    def new_client(self, timeout: float) -> httpx.Client:
        """One more client of this server, where the server is."""
        make = self.host.client if self.host else httpx.Client
        return make(
            base_url=f"http://127.0.0.1:{self.port}", timeout=timeout, trust_env=False
        )

    def is_healthy(self) -> bool:
        """Whether it answers that it is.

        Raises:
            RuntimeError: It ended; has the log's end.
        """
        if (code := self.process.popen.poll()) is not None:
            raise RuntimeError(
                f"The {self.title} ended with status {code}.\n{self.process.tail()}"
            )
        try:
            return self.client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        """Wait until the server is healthy.

        Raises:
            RuntimeError: It ended, or is not healthy in time; has the log's end.
        """
        wait_ready(self, timeout=self.start_timeout)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        answer = self.client.post(path, json=body, headers=headers)
        if answer.status_code != 200:
            raise RuntimeError(
                f"{path}: {answer.status_code} {answer.text}\n{self.process.tail()}"
            )
        return answer.json()

    def complete(self, prompt: Sequence[int], max_tokens: int = 6) -> dict[str, Any]:
        """Greedy tokens and logprobs of one completion, as tests compare them."""
        answer = self.post(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 5,
                "return_tokens_as_token_ids": True,
            },
        )
        found = answer["choices"][0]["logprobs"]
        return {
            "tokens": [token.removeprefix("token_id:") for token in found["tokens"]],
            "logprobs": [
                {key.removeprefix("token_id:"): value for key, value in row.items()}
                for row in found["top_logprobs"]
            ],
        }

    def watch_steps(self) -> None:
        self.post("/collective_rpc", {"method": "watch_steps"})

    def watched_steps(self) -> list[dict[str, Any]]:
        """Steps since the last call, from the first (and only) worker."""
        return self.post("/collective_rpc", {"method": "watched_steps"})["results"][0]

    def stop(self) -> int | None:
        """End the server as a user does.

        Returns:
            Its exit status, None if it had to be killed.
        """
        self.client.close()
        if self.process.popen.poll() is None:
            self.process.popen.terminate()
        code = self.process.wait(STOP_TIMEOUT_S)
        self.process.kill()
        return code


def wait_ready(*servers: Server, timeout: float) -> None:
    """Wait until all are healthy.

    Raises:
        RuntimeError: One ended, or is not healthy in time; has its log's end.
    """
    deadline = time.monotonic() + timeout
    while True:
        # All are asked, also if one is not ready: any of them may have ended.
        healthy = [server.is_healthy() for server in servers]
        if all(healthy):
            return
        if time.monotonic() > deadline:
            tails = "\n".join(server.process.tail() for server in servers)
            raise RuntimeError(f"Not healthy after {timeout:.0f} s.\n{tails}")
        time.sleep(0.2)
