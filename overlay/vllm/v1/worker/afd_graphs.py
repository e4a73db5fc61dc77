# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA graphs of the FFN role of AFD.

To NCCL, a captured message is one of both sides: both capture it, and both replay what
they have captured together. So FFN captures when attention says that it does, and
replays the graph of the number that attention replays. What is captured is not run:
nothing travels meanwhile.
"""

import contextlib
from collections.abc import Callable

import torch

from vllm.distributed.afd_transfer.errors import AFDError
from vllm.distributed.afd_transfer.messages import AFDStep
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker.workspace import (
    is_workspace_manager_initialized,
    lock_workspace,
    unlock_workspace,
)

logger = init_logger(__name__)


class AFDGraphs:
    """The graphs for one attention rank, by the numbers that it gives them.

    They use the buffers of the connector, which stay where they are, and the workspace,
    which must not move either: it may not grow while there are graphs. The profile run
    before them was the largest step.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: dict[int, tuple[list[int], torch.cuda.CUDAGraph]] = {}
        # Memory is used again by what is captured on the same stream only.
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple[int, int] | None = None
        self.failed = False
        """A capture was not ended well, and torch may be unable to begin another."""

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, step: AFDStep, run: Callable[[], None]) -> None:
        """Capture a step.

        Args:
            step: As attention has announced it. A graph of the same number is replaced,
                as attention has replaced its own.
            run: Runs the step.

        Raises:
            Exception: What `run` has raised, or else torch.

        """
        assert step.graph is not None
        if is_workspace_manager_initialized():
            lock_workspace()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        error: BaseException | None = None
        try:
            with graph_capture(self._device), torch.cuda.stream(self._stream):
                # The workspace of cuBLAS is not to be part of the pool.
                torch.cuda.current_blas_handle()
                # Other threads may use CUDA meanwhile.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=current_stream(),
                    capture_error_mode="thread_local",
                ):
                    try:
                        run()
                    except BaseException as e:
                        error = e
                        raise
        except BaseException as e:
            # Else, the capture has come to an end nonetheless.
            self.failed = e is not error
            # A traceback may refer to it.
            with contextlib.suppress(Exception):
                graph.reset()
            # What torch says of a capture that was left is less.
            raise (error or e) from None
        # Only now is the one that it replaces released: a pool that nobody uses ends.
        self._graphs[step.graph] = step.stage_tokens, graph
        self._pool = graph.pool()
        logger.debug("CUDA graph %d has stages of %s.", step.graph, step.stage_tokens)

    def replay(self, step: AFDStep) -> None:
        """Replay a captured step on the current stream.

        Raises:
            AFDError: It was not captured, or with other stages.

        """
        assert step.graph is not None
        stage_tokens, graph = self._graphs.get(step.graph, (None, None))
        if graph is None or stage_tokens != step.stage_tokens:
            raise AFDError(
                f"Attention replays CUDA graph {step.graph} with stages of "
                f"{step.stage_tokens} tokens in step {step.seq}, which was captured "
                f"here with {stage_tokens or 'none'}. There are {len(self)} graphs."
            )
        graph.replay()

    def clear(self) -> None:
        """Release the graphs, without which no communicator of NCCL ends."""
        if self._stream is not None and is_workspace_manager_initialized():
            unlock_workspace()
        for _, graph in self._graphs.values():
            # A traceback may refer to it.
            graph.reset()
        self._graphs.clear()
        self._pool = None
