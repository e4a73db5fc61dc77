# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The names of a model's missing layers are those of that model alone."""

import gc
import weakref

import pytest
from torch import nn

from vllm.model_executor.models.utils import (
    PPMissingLayer,
    StageMissingLayer,
    is_pp_missing_parameter,
)

pytestmark = pytest.mark.cpu_test


def make_model(norm: nn.Module) -> nn.Module:
    model = nn.Module()
    model.norm = norm
    return model


@pytest.mark.parametrize("missing_layer", [PPMissingLayer(), StageMissingLayer("x")])
def test_a_model_is_not_taken_for_one_that_is_gone(missing_layer):
    # Sooner or later, often at once, a model gets the address of a freed one.
    for _ in range(1000):
        model = make_model(missing_layer)
        assert is_pp_missing_parameter("norm.weight", model)
        del model
        model = make_model(nn.LayerNorm(2))
        assert not is_pp_missing_parameter("norm.weight", model)


def test_asking_does_not_keep_a_model_alive():
    model = make_model(PPMissingLayer())
    assert is_pp_missing_parameter("norm.weight", model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
