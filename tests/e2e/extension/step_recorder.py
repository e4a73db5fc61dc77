"""Records what a model runner did in each step, and changes nothing.

A server takes it in with vLLM's own `--worker-extension-cls`, with this folder in
`PYTHONPATH`; see tests/e2e/servers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recorder:
    """Notes each step: tokens per request, whether any prefills, how it was run.

    Of a step: `tokens` scheduled per request; `prefill`: whether any request is not
    past its prompt; `hits`: tokens that requests new in it found in the prefix cache;
    `slices`: requests and tokens of each ubatch, none if it was not split; `ran`:
    ubatch and rows of each run of the model; `layers`: runs of a decoder layer as
    Python code; `yields`: ubatch at each handoff.

    Whether a request prefills is worked out from the scheduler's output alone, so
    that a test can judge the runner's decision to split.
    """

    def __init__(self, runner: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self._prompt: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._wrap(runner, "execute_model", self._on_step)
        # Not counted where compiled code runs in its place.
        for module in runner.model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                module.register_forward_pre_hook(self._on_layer)
        # Model Runner V1 has no ubatch runner on a CPU.
        if getattr(runner, "ubatch_runner", None) is not None:
            from vllm.v1.worker import ubatching

            self._current_ubatch = ubatching.dbo_current_ubatch_id
            self._enabled = ubatching.dbo_enabled
            self._wrap(ubatching, "dbo_yield", self._on_yield)
            self._wrap(runner.ubatch_runner, "prepare", None, self._on_prepare)
            runner.model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def clear(self) -> None:
        self.steps = []
        self._prompt.clear()
        self._computed.clear()

    @staticmethod
    def _wrap(
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after:
                after(result)
            return result

        setattr(owner, name, wrapped)

    def _on_step(self, scheduled: Any, *_: Any, **__: Any) -> None:
        hits = 0
        for request in scheduled.scheduled_new_reqs:
            self._prompt[request.req_id] = len(request.prompt_token_ids)
            self._computed[request.req_id] = request.num_computed_tokens
            hits += request.num_computed_tokens
        counts = scheduled.num_scheduled_tokens
        if not counts:
            return
        self.steps.append(
            {
                "tokens": list(counts.values()),
                "prefill": any(
                    self._computed[name] < self._prompt[name] for name in counts
                ),
                "hits": hits,
                "slices": [],
                "ran": [],
                "layers": 0,
                "yields": [],
            }
        )
        for name, count in counts.items():
            self._computed[name] += count

    def _on_prepare(self, state: Any) -> None:
        if self.steps:
            self.steps[-1]["slices"] = [
                [
                    part.request_slice.start,
                    part.request_slice.stop,
                    part.token_slice.start,
                    int(part.token_slice.stop),
                ]
                for part in state.slices
            ]

    def _on_layer(self, *_: Any) -> None:
        if self.steps:
            self.steps[-1]["layers"] += 1

    def _on_yield(self) -> None:
        if self.steps:
            self.steps[-1]["yields"].append(self._current_ubatch())

    def _on_forward(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        if self.steps and self._enabled():
            rows = inputs["input_ids"].shape[0]
            self.steps[-1]["ran"].append([self._current_ubatch(), rows])


class StepRecorder:
    """Methods for `/collective_rpc` that a worker gets."""

    def watch_steps(self) -> None:
        """Start to record."""
        self._recorder = Recorder(self.model_runner)

    def watched_steps(self) -> list[dict[str, Any]]:
        """Steps since the last call."""
        steps = self._recorder.steps
        self._recorder.steps = []
        return steps
