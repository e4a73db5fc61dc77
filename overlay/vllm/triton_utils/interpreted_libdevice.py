# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-in for `triton.language.extra.libdevice` in Triton's interpreter.

The interpreter cannot call the device library: a function of it returns None
there. These are built from `triton.language` only. A function that is not here is
an AttributeError where it is used.
"""

from vllm.triton_utils import tl, triton


@triton.jit
def isnan(x):
    return x != x


@triton.jit
def log1p(x):
    # log(y) / (y - 1) varies slowly, so the rounding error of y cancels out.
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))
