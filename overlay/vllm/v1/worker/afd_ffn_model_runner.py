# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The FFN role of AFD: runs the MoE layers of a model for the attention server."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.distributed.afd_transfer.afd_connector.base import AFDTransfer
from vllm.distributed.afd_transfer.afd_session import AFDSession, describe_server
from vllm.distributed.afd_transfer.control import AFDControl
from vllm.distributed.afd_transfer.errors import AFDError
from vllm.distributed.afd_transfer.listener import AFDListener
from vllm.distributed.afd_transfer.messages import AFDHello, AFDStep
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.logger import init_logger
from vllm.model_executor.afd import moe_runners, run_ffn_layer
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import get_model_loader
from vllm.tasks import SupportedTask
from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(__name__)

_JOIN_TIMEOUT_S = 5.0


class AFDFFNModelRunner:
    """Serves one attention server after the other, in a thread of its own.

    It has no KV cache, no requests and no sampler, and the engine never runs it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        on_failure: Callable[[Exception], None],
    ):
        """Take the port, so that a start that cannot work ends before the weights
        are loaded.

        Args:
            vllm_config: The config of this instance.
            device: Where the weights go.
            on_failure: Called, from the serving thread, with why it has ended.

        """
        assert vllm_config.afd_config is not None
        self.vllm_config = vllm_config
        self.afd_config = vllm_config.afd_config
        self.device = device
        self.model: nn.Module | None = None
        self.model_memory_usage = 0
        self.kv_caches: list[torch.Tensor] = []
        self.lora_config = None
        self._on_failure = on_failure
        self._listener = AFDListener(self.afd_config)
        self._stop = threading.Event()
        self._runners: list[MoERunner] = []
        self._control: AFDControl | None = None
        self._session: AFDSession | None = None
        self._thread: threading.Thread | None = None

    # What the worker calls.

    def load_model(self, load_dummy_weights: bool = False) -> None:
        load_config = self.vllm_config.load_config
        if load_dummy_weights:
            load_config.load_format = "dummy"
        start = time.perf_counter()
        self.model = get_model_loader(load_config).load_model(
            vllm_config=self.vllm_config, model_config=self.vllm_config.model_config
        )
        self.model_memory_usage = sum(p.nbytes for p in self.model.parameters())
        logger.info(
            "Loaded the experts: %.2f GiB, %.2f seconds.",
            self.model_memory_usage / 2**30,
            time.perf_counter() - start,
        )

    def get_model(self) -> nn.Module:
        return self.model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {}

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_max_model_len(self, max_model_len: int) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ()

    def execute_model(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("A server with the AFD role 'ffn' runs no requests.")

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "AFD does not support reload_weights: the other role would go on with "
            "the old weights. Restart both."
        )

    def start_serving(self) -> None:
        """Listen for an attention server and serve it, until `shutdown`."""
        # Built here, where it fails the start.
        hello = describe_server(self.vllm_config, self.model)
        self._runners = moe_runners(self.vllm_config)
        self._listener.listen()
        self._thread = threading.Thread(
            target=self._serve, args=(hello,), daemon=True, name="AFDFFNLoop"
        )
        self._thread.start()

    def shutdown(self) -> None:
        """Say goodbye to the attention server, if one is connected, and end."""
        self._stop.set()
        self._listener.close()
        if (control := self._control) is not None:
            # Ends every wait on the control connection. Whoever waits for the data
            # plane is woken by the session.
            control.close()
        if (session := self._session) is not None:
            session.interrupt()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
            self._thread = None
        self.model = None
        self._runners = []

    # The serving thread.

    def _serve(self, hello: AFDHello) -> None:
        try:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device)
            with torch.inference_mode():
                while not self._stop.is_set():
                    self._serve_one(hello)
        except Exception as e:
            if self._stop.is_set():
                logger.debug("The serving thread was stopped: %s", e)
                return
            if not isinstance(e, AFDError):
                logger.exception("The AFD FFN role failed.")
            self._on_failure(e)
        finally:
            self._listener.close()

    def _serve_one(self, hello: AFDHello) -> None:
        """Serve one attention server, from its hello to its goodbye.

        Raises:
            AFDError: None came in time, or the one that came was lost.

        """
        control = self._listener.accept(
            hello, self.afd_config.connect_timeout_s, self._stop
        )
        if control is None:
            return
        # For shutdown(), which may come at any time.
        self._control = control
        session: AFDSession | None = None
        try:
            session = AFDSession(self.vllm_config, control, hello, self._on_failure)
            self._session = session
            if self._stop.is_set():
                return
            while (step := control.recv_step()) is not None:
                self._run_step(session, step)
        except Exception as e:
            # Attention may leave while the data plane connects or within a step, as
            # it must to end at once.
            if not control.peer_said_bye:
                if session is not None:
                    session.fail(e)
                raise
        finally:
            if session is not None:
                session.close()
            self._control = self._session = None

    def _run_step(self, session: AFDSession, step: AFDStep) -> None:
        connector = session.connector
        num_stages = len(step.stage_tokens)
        may_compile = step.kind in ("profile", "warmup")

        def transfer(layer: int, stage: int) -> AFDTransfer:
            return AFDTransfer(
                seq=step.seq,
                layer=layer,
                stage=stage,
                num_stages=num_stages,
                rows=step.stage_tokens[stage],
                logits_size=session.layers[layer].logits_size,
            )

        # One a stage, as each stage runs all layers in order.
        contexts = [
            create_forward_context(None, self.vllm_config) for _ in range(num_stages)
        ]
        for stage in range(num_stages):
            connector.post_recv(transfer(0, stage))
        for layer, runner in enumerate(self._runners):
            for stage in range(num_stages):
                current = transfer(layer, stage)
                hidden_states, router_logits = connector.recv(current, may_compile)
                with override_forward_context(contexts[stage]):
                    output = run_ffn_layer(runner, hidden_states, router_logits)
                connector.send(current, output)
                if layer + 1 < len(self._runners):
                    connector.post_recv(transfer(layer + 1, stage))
