# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The shared experts' outputs of concurrent microbatches (DBO)."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from vllm.config import ParallelConfig
from vllm.model_executor.layers.fused_moe.runner import shared_experts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import (
    SharedExperts,
    SharedExpertsOrder,
)


@pytest.mark.parametrize(
    "parallel_kwargs",
    [
        {"enable_dbo": True},
        {"ubatch_size": 2},
        {"ubatch_size": 3},
        {},
    ],
)
def test_each_microbatch_keeps_its_output(parallel_kwargs: dict):
    """Microbatches hand off between computing an output and taking it."""
    num_ubatches = max(1, ParallelConfig(**parallel_kwargs).num_ubatches)
    moe_parallel_config = SimpleNamespace(
        enable_eplb=False, use_fi_nvl_two_sided_kernels=False
    )
    layer = SharedExperts(
        torch.nn.Identity(),
        moe_config=SimpleNamespace(moe_parallel_config=moe_parallel_config),
        num_ubatches=num_ubatches,
        mk_can_overlap_shared_experts=lambda: True,
    )

    def on_ubatch(ubatch_id: int):
        return patch.object(shared_experts, "dbo_current_ubatch_id", lambda: ubatch_id)

    for i in range(num_ubatches):
        with on_ubatch(i):
            layer(torch.tensor(i), SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
    for i in range(num_ubatches):
        with on_ubatch(i):
            assert layer.output.item() == i
