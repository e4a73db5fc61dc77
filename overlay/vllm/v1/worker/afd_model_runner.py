# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the model runner of a worker with an AFD role."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def make_afd_model_runner(worker: "WorkerBase") -> Any:
    """Make the model runner for the AFD role of `worker`.

    It reports the loss of the other role as a failure of the worker.
    """
    vllm_config = worker.vllm_config
    assert vllm_config.afd_config is not None
    if vllm_config.afd_config.is_ffn:
        raise NotImplementedError("The AFD role 'ffn' is not supported yet.")

    from vllm.v1.worker.afd_attention_model_runner import AFDAttentionModelRunner

    return AFDAttentionModelRunner(vllm_config, worker.device, worker.report_failure)
