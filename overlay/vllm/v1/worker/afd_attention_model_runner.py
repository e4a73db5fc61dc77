# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The attention role of AFD: Model Runner V2, whose MoE layers run on the peer."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.afd_session import AFDSession, describe_server
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError
from vllm.distributed.afd_transfer.messages import AFDStep
from vllm.logger import init_logger
from vllm.model_executor.afd import set_afd_exchange
from vllm.platforms import current_platform
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_yield

if current_platform.is_cpu():
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as ModelRunner
else:
    from vllm.v1.worker.gpu.model_runner import (  # type: ignore[assignment]
        GPUModelRunner as ModelRunner,
    )

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.ubatch_utils import UBatchSlices

logger = init_logger(__name__)

_LOG_INTERVAL_S = 60.0


@dataclass
class AFDStats:
    """What the attention role exchanged since it connected."""

    steps: int = 0
    split_steps: int = 0
    exchanges: int = 0
    bytes: int = 0
    """Of hidden states and router logits, in both directions."""
    wait_s: float = 0.0
    """Time in which the model waited for an answer."""
    overlapped: int = 0
    """Exchanges whose answer was there when the other microbatch handed back."""


@dataclass
class _Step:
    seq: int
    stage_tokens: list[int]
    exchanges: list[int] = field(init=False)
    """Done so far, by stage."""

    def __post_init__(self):
        self.exchanges = [0] * len(self.stage_tokens)


class AFDAttention:
    """Sends what the MoE layers of a step get to the FFN peer, and gets the results.

    A step is begun before the model runs, and ended or aborted after. Meanwhile the
    model calls `exchange` once per MoE layer and stage: in order of the layers within
    a stage, while the stages take turns.
    """

    def __init__(self, session: AFDSession):
        self.session = session
        self.stats = AFDStats()
        self._seq = 0
        self._step: _Step | None = None
        self._goodbye: str | None = None
        self._next_log = time.monotonic() + _LOG_INTERVAL_S

    @classmethod
    def connect(
        cls,
        vllm_config: VllmConfig,
        model: nn.Module,
        on_failure: Callable[[Exception], None],
    ) -> "AFDAttention":
        """Connect to the FFN server, which may be started later than this one.

        Args:
            vllm_config: The config of this instance.
            model: The model, whose weights are loaded.
            on_failure: Called, from any thread, when the peer is lost.

        Raises:
            AFDError: It did not come in time, or does not fit to this instance.

        """
        assert vllm_config.afd_config is not None
        hello = describe_server(vllm_config, model)
        control = AFDControl.connect(vllm_config.afd_config, hello)
        return cls(AFDSession(vllm_config, control, hello, on_failure))

    def begin_step(self, kind: str, stage_tokens: list[int]) -> None:
        """Tell the peer what this step will send.

        Args:
            kind: See `AFDStep`.
            stage_tokens: Rows of each stage.

        """
        self.session.control.check()
        self._seq += 1
        self._step = _Step(self._seq, stage_tokens)
        self.session.control.send_step(
            AFDStep(seq=self._seq, kind=kind, stage_tokens=stage_tokens)
        )

    def exchange(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """Have the peer run a MoE layer. The other microbatch runs meanwhile.

        Args:
            layer: Its index among the MoE layers.
            hidden_states: What it gets, of shape [rows, hidden size].
            router_logits: Of shape [rows, experts], if the gate runs here.

        Returns:
            Its output, of the shape of `hidden_states`, in memory of its own.

        """
        step = self._step
        if step is None:
            raise AFDError("A MoE layer runs, but no step has begun.")
        num_stages = len(step.stage_tokens)
        stage = dbo_current_ubatch_id() if num_stages > 1 else 0
        rows = hidden_states.shape[0]
        if rows != step.stage_tokens[stage] or layer != step.exchanges[stage]:
            raise AFDError(
                f"MoE layer {layer} runs on {rows} tokens in stage {stage} of step "
                f"{step.seq}, which was to run layer {step.exchanges[stage]} on "
                f"{step.stage_tokens[stage]} tokens."
            )
        transfer = AFDTransfer(
            seq=step.seq,
            layer=layer,
            stage=stage,
            num_stages=num_stages,
            rows=rows,
            logits_size=self.session.layers[layer].logits_size,
        )
        handle = self.session.connector.submit(transfer, hidden_states, router_logits)
        step.exchanges[stage] += 1
        dbo_yield()
        ready = handle.done()
        start = time.perf_counter()
        output = handle.wait()

        stats = self.stats
        stats.exchanges += 1
        stats.wait_s += time.perf_counter() - start
        stats.overlapped += ready and num_stages > 1
        stats.bytes += hidden_states.nbytes + output.nbytes
        if router_logits is not None:
            stats.bytes += router_logits.nbytes
        return output

    def end_step(self) -> None:
        """Note that the model has run.

        Raises:
            AFDError: It has not run every MoE layer, so the peer waits for more.

        """
        step, self._step = self._step, None
        if step is None:
            return
        num_layers = len(self.session.layers)
        if any(exchanges != num_layers for exchanges in step.exchanges):
            error = AFDError(
                f"The model ran {step.exchanges} of the {num_layers} MoE layers in "
                f"the stages of step {step.seq}."
            )
            self.session.fail(error)
            raise error
        self.stats.steps += 1
        self.stats.split_steps += len(step.stage_tokens) > 1
        if time.monotonic() >= self._next_log:
            self._log_stats()

    def abort_step(self, error: BaseException) -> None:
        """Tell the peer why the step, if one has begun, does not go on."""
        step, self._step = self._step, None
        if step is None:
            return
        if isinstance(error, Exception):
            self.session.fail(error)
        else:
            # The process was told to end: no fault, but FFN may wonder.
            self._goodbye = f"it was stopped in the middle of step {step.seq}"

    def close(self) -> None:
        """Say goodbye to the peer, or that it is none, and release the connection."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            # Nobody has told this server to end.
            self.session.control.fail(f"its parent process {parent.name} died")
        self.session.close(self._goodbye)
        self._log_stats()

    def _log_stats(self) -> None:
        self._next_log = time.monotonic() + _LOG_INTERVAL_S
        stats = self.stats
        logger.info(
            "AFD: %d steps, %d of them split, %d exchanges of %.1f MiB in all, "
            "%.2f s of waiting, %d answers there when the other microbatch handed "
            "back.",
            stats.steps,
            stats.split_steps,
            stats.exchanges,
            stats.bytes / 2**20,
            stats.wait_s,
            stats.overlapped,
        )


class AFDAttentionMixin:
    """Makes a Model Runner V2 that of the attention role."""

    vllm_config: VllmConfig
    model: nn.Module

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        on_failure: Callable[[Exception], None],
    ):
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.afd: AFDAttention | None = None
        self._on_afd_failure = on_failure

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        # The peer has to be there from the first dummy run on.
        self.afd = AFDAttention.connect(
            self.vllm_config, self.model, self._on_afd_failure
        )
        set_afd_exchange(self.vllm_config, self.afd.exchange)

    def before_forward(
        self,
        input_batch: "InputBatch",
        batch_desc: "BatchExecutionDescriptor",
        ubatch_slices: "UBatchSlices | None",
        dummy_run: bool,
        is_profile: bool,
    ) -> None:
        if ubatch_slices is None:
            stage_tokens = [input_batch.num_tokens_after_padding]
        else:
            stage_tokens = [s.num_tokens for s in ubatch_slices]
        kind = "profile" if is_profile else "warmup" if dummy_run else "eager"
        assert self.afd is not None
        self.afd.begin_step(kind, stage_tokens)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        assert self.afd is not None
        try:
            output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        except BaseException as e:
            self.afd.abort_step(e)
            raise
        self.afd.end_step()
        return output

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "AFD does not support reload_weights: the other role would go on with "
            "the old weights. Restart both."
        )

    def shutdown(self) -> None:
        if self.afd is not None:
            set_afd_exchange(self.vllm_config, None)
            self.afd.close()
            self.afd = None
        super().shutdown()  # type: ignore[misc]


class AFDAttentionModelRunner(AFDAttentionMixin, ModelRunner):
    """Model Runner V2 of this platform, with the attention role."""
