# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton's interpreter in place of a driver, on CPU."""

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from typing import Any
from unittest import mock

import pytest

from vllm.platforms import current_platform
from vllm.triton_utils import importing as triton_importing


def _has_triton(
    *, is_cpu: bool = False, env: dict[str, str] | None = None, **drivers: bool
) -> bool:
    """Re-evaluate ``HAS_TRITON`` against a synthetic ``triton.backends`` map.

    ``drivers`` maps backend name to whether its driver reports itself active.
    """
    backends = {}
    for name, is_active in drivers.items():
        driver = mock.Mock()
        driver.is_active.return_value = is_active
        backends[name] = mock.Mock(driver=driver)
    fake_backends: Any = types.ModuleType("triton.backends")
    fake_backends.backends = backends
    fake_triton: Any = types.ModuleType("triton")
    fake_triton.__path__ = []
    fake_triton.backends = fake_backends
    modules = {"triton": fake_triton, "triton.backends": fake_backends}
    before = dict(vars(triton_importing))
    try:
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.dict("os.environ", env or {}, clear=True),
            mock.patch.object(current_platform, "is_cpu", lambda: is_cpu),
            mock.patch.object(importlib.util, "find_spec", lambda name: mock.Mock()),
        ):
            return importlib.reload(triton_importing).HAS_TRITON
    finally:
        # Other tests hold the classes that were there before.
        vars(triton_importing).update(before)


@pytest.mark.parametrize("value", ["1", "true", "True", "on", "ON", "yes", "y"])
def test_interpreter_needs_no_driver_on_cpu(value: str):
    env = {"TRITON_INTERPRET": value}
    assert _has_triton(is_cpu=True, env=env, nvidia=False) is True


@pytest.mark.parametrize("value", ["", "0", "false", "off", "2"])
def test_interpreter_off_keeps_triton_disabled_on_cpu(value: str):
    env = {"TRITON_INTERPRET": value}
    assert _has_triton(is_cpu=True, env=env, nvidia=False) is False


def test_interpreter_does_not_replace_the_driver_off_cpu():
    env = {"TRITON_INTERPRET": "1"}
    assert _has_triton(env=env, nvidia=False) is False


@pytest.mark.parametrize("value", ["1", "TRUE", "on", "Yes", "y", "", "0", "no", "2"])
def test_interpreter_is_read_the_way_triton_reads_it(
    monkeypatch: pytest.MonkeyPatch, value: str
):
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton_importing.is_interpreter_enabled() is knobs.runtime.interpret


def _run_in_interpreter(script: str) -> None:
    """Run a script with Triton interpreted; kernels are decorated on import, so
    this needs a fresh process."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    env.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


needs_cpu_platform = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="needs the CPU platform"
)


@needs_cpu_platform
def test_v2_model_runner_kernels_run_in_the_interpreter():
    _run_in_interpreter("""
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

assert VllmConfig().use_v2_model_runner

positions = torch.full((5,), -1)
seq_lens = torch.full((4,), -1, dtype=torch.int32)
prepare_pos_seq_lens(
    idx_mapping=torch.tensor([1, 0], dtype=torch.int32),
    query_start_loc=torch.tensor([0, 2, 5], dtype=torch.int32),
    num_computed_tokens=torch.tensor([10, 20], dtype=torch.int32),
    pos=positions,
    seq_lens=seq_lens,
)
assert positions.tolist() == [20, 21, 10, 11, 12], positions
assert seq_lens.tolist() == [22, 13, 0, 0], seq_lens
""")


@needs_cpu_platform
def test_random_sampling_runs_in_the_interpreter():
    """It uses libdevice, which the interpreter cannot call, and a kernel that the
    interpreter cannot run."""
    _run_in_interpreter("""
import torch
from vllm.triton_utils import tl, tldevice, triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

@triton.jit
def log1p_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tldevice.log1p(tl.load(x_ptr + i)))

x = -torch.rand(512)
x = torch.cat([x, x * 1e-4, x * 1e-8, torch.tensor([0.0, -1.0]), torch.rand(510)])
out = torch.empty_like(x)
log1p_kernel[(1,)](x, out, N=x.numel())
torch.testing.assert_close(out, x.log1p(), rtol=1e-6, atol=0)

nan = float("nan")
logits = torch.tensor([[0.0, 1.0, nan], [0.0, 1.0, 2.0], [nan, nan, float("inf")]])
assert get_num_nans(logits).tolist() == [1, 0, 2]

logits = torch.tensor([[1.0, 2.0, 4.0, 3.0]]).repeat(9, 1)
masked = apply_top_k_top_p(logits, torch.full((9,), 3), torch.full((9,), 0.9))
assert masked.isfinite().tolist() == [[False, False, True, True]] * 9

num_draws = 1500
probs = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
sampled = gumbel_sample(
    probs.log().repeat(num_draws, 1),
    torch.zeros(num_draws, dtype=torch.int32),
    torch.ones(1),
    torch.tensor([42]),
    torch.arange(num_draws),
    apply_temperature=True,
    is_drafting=False,
)
share = sampled.bincount(minlength=5) / num_draws
# Five standard deviations of the largest share are 0.065.
assert (share - probs).abs().max() < 0.065, share
assert share[4] == 0, share
""")
