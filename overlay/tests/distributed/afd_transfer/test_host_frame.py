# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from dataclasses import replace

import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout, AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.host_frame import (
    AFDFrameError,
    HostFrameSlot,
)

from .utils import make_input

pytestmark = pytest.mark.skip_global_cleanup

LAYOUT = AFDLayout(9, 2, 10, torch.bfloat16, logits_size=6)
TRANSFER = AFDTransfer(seq=7, layer=3, stage=1, num_stages=2, rows=5, logits_size=6)
SESSION = 2**64 - 3


def transmit(source: HostFrameSlot, nbytes: int, target: HostFrameSlot) -> None:
    target.buffer[:nbytes] = source.buffer[:nbytes]


def slots(layout: AFDLayout = LAYOUT, carries_logits: bool = True):
    return (
        HostFrameSlot(layout, SESSION, carries_logits),
        HostFrameSlot(layout, SESSION, carries_logits),
    )


@pytest.mark.parametrize("rows", [0, 1, 5, 9])
@pytest.mark.parametrize("logits_size", [0, 1, 6])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_round_trip(rows, logits_size, dtype, logits_dtype):
    layout = replace(LAYOUT, hidden_dtype=dtype, logits_dtype=logits_dtype)
    transfer = replace(TRANSFER, rows=rows, logits_size=logits_size)
    source, target = slots(layout)
    hidden_states, router_logits = make_input(layout, transfer)
    nbytes = source.write(transfer, hidden_states, router_logits)
    assert nbytes <= HostFrameSlot.slot_nbytes(layout, True) == source.buffer.numel()

    target.clear(transfer)
    assert not target.arrived()
    transmit(source, nbytes - 1, target)
    assert not target.arrived()
    transmit(source, nbytes, target)
    assert target.arrived()
    hidden_view, logits_view = target.read(transfer)
    assert torch.equal(hidden_view, hidden_states)
    assert hidden_view.dtype == dtype
    # In place, where vectorized kernels like it.
    assert rows == 0 or hidden_view.data_ptr() == target.buffer.data_ptr() + 64
    assert hidden_view.is_contiguous()
    if logits_size == 0:
        assert logits_view is None
    else:
        assert torch.equal(logits_view, router_logits)
        assert logits_view.dtype == logits_dtype
        assert logits_view.data_ptr() % 64 == 0
        assert logits_view.is_contiguous()


def test_the_largest_frame_fills_the_slot():
    source, _ = slots()
    transfer = replace(TRANSFER, rows=9)
    assert source.write(transfer, *make_input(LAYOUT, transfer)) == (
        source.buffer.numel()
    )


def test_answers_carry_no_logits():
    source, target = slots(carries_logits=False)
    assert source.buffer.numel() < HostFrameSlot.slot_nbytes(LAYOUT, True)
    hidden_states, router_logits = make_input(LAYOUT, TRANSFER)
    target.clear(TRANSFER)
    transmit(source, source.write(TRANSFER, hidden_states), target)
    hidden_view, logits_view = target.read(TRANSFER)
    assert torch.equal(hidden_view, hidden_states)
    assert logits_view is None
    with pytest.raises(ValueError, match=r"router logits .* must be \[5, 0\]"):
        source.write(TRANSFER, hidden_states, router_logits)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], dim=2)[..., 1],
        lambda x: x[:1].expand_as(x),
    ],
    ids=["transposed", "strided", "expanded"],
)
def test_any_strides(make):
    source, target = slots()
    hidden_states, router_logits = map(make, make_input(LAYOUT, TRANSFER))
    assert not hidden_states.is_contiguous()
    nbytes = source.write(TRANSFER, hidden_states, router_logits)
    target.clear(TRANSFER)
    transmit(source, nbytes, target)
    hidden_view, logits_view = target.read(TRANSFER)
    assert torch.equal(hidden_view, hidden_states)
    assert torch.equal(logits_view, router_logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 8),
        ("seq", 2**64 - 1),
        ("layer", 2),
        ("stage", 0),
        ("num_stages", 1),
        ("rows", 4),
        ("rows", 6),
        ("logits_size", 5),
    ],
)
def test_a_wrong_field_is_named_with_both_values(field, value):
    sent = replace(TRANSFER, **{"stage": 0, field: value})
    expected = replace(TRANSFER, stage=1 if field == "stage" else 0)
    source, target = slots()
    target.clear(expected)
    transmit(source, source.write(sent, *make_input(LAYOUT, sent)), target)
    with pytest.raises(AFDFrameError) as error:
        target.read(expected)
    wanted = getattr(expected, field)
    assert str(error.value) == (
        f"wrong AFD frame: {field} is {value}, expected {wanted}"
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 11, "hidden_size is 11, expected 10"),
        (
            "hidden_dtype",
            torch.float16,
            "hidden_dtype is torch.float16, expected torch.bfloat16",
        ),
        (
            "logits_dtype",
            torch.bfloat16,
            "logits_dtype is torch.bfloat16, expected torch.float32",
        ),
    ],
)
def test_a_wrong_layout_is_named(field, value, message):
    other = replace(LAYOUT, **{field: value})
    source, target = HostFrameSlot(other, SESSION, True), slots()[0]
    target.clear(TRANSFER)
    nbytes = source.write(TRANSFER, *make_input(other, TRANSFER))
    nbytes = min(nbytes, target.buffer.numel())
    transmit(source, nbytes, target)
    with pytest.raises(AFDFrameError, match=message):
        target.read(TRANSFER)


def test_all_wrong_fields_are_named():
    source, target = slots()
    sent = replace(TRANSFER, seq=1, layer=1)
    target.clear(TRANSFER)
    transmit(source, source.write(sent, *make_input(LAYOUT, sent)), target)
    with pytest.raises(AFDFrameError, match="seq is 1, expected 7; layer is 1, exp"):
        target.read(TRANSFER)


def test_a_frame_of_another_session_or_version_is_refused():
    _, target = slots()
    source = HostFrameSlot(LAYOUT, SESSION - 1, True)
    nbytes = source.write(TRANSFER, *make_input(LAYOUT, TRANSFER))
    target.clear(TRANSFER)
    transmit(source, nbytes, target)
    with pytest.raises(AFDFrameError, match=f"session is {SESSION - 1}, expected"):
        target.read(TRANSFER)

    source = HostFrameSlot(LAYOUT, SESSION, True)
    source.write(TRANSFER, *make_input(LAYOUT, TRANSFER))
    source.buffer[4] += 1
    transmit(source, nbytes, target)
    with pytest.raises(AFDFrameError, match="version is 2, expected 1"):
        target.read(TRANSFER)


def test_garbage_nothing_and_a_truncated_frame():
    source, target = slots()
    target.clear(TRANSFER)
    with pytest.raises(AFDFrameError, match="does not start with a header"):
        target.read(TRANSFER)
    target.buffer.fill_(0xA5)
    with pytest.raises(AFDFrameError, match="does not start with a header"):
        target.read(TRANSFER)
    nbytes = source.write(TRANSFER, *make_input(LAYOUT, TRANSFER))
    target.clear(TRANSFER)
    transmit(source, nbytes - 8, target)
    with pytest.raises(AFDFrameError, match="truncated"):
        target.read(TRANSFER)


def test_a_complete_frame_before_does_not_hide_a_truncated_one():
    source, target = slots()
    nbytes = source.write(TRANSFER, *make_input(LAYOUT, TRANSFER))
    transmit(source, nbytes, target)
    target.read(TRANSFER)
    again = replace(TRANSFER, layer=4)
    target.clear(again)
    source.write(again, *make_input(LAYOUT, again))
    transmit(source, nbytes - 1, target)
    with pytest.raises(AFDFrameError, match="truncated"):
        target.read(again)


@pytest.mark.parametrize(
    ("hidden", "logits", "message"),
    [
        (torch.zeros(4, 10, dtype=torch.bfloat16), None, r"hidden.*\[5, 10\].*\[4, 10"),
        (torch.zeros(5, 10), None, "hidden states.*bfloat16.*not.*float32"),
        (torch.zeros(50, dtype=torch.bfloat16), None, r"hidden.*not \[50\]"),
        (
            torch.zeros(5, 10, dtype=torch.bfloat16, device="meta"),
            None,
            "hidden.*on cpu, not.*on meta",
        ),
        (torch.zeros(5, 10, dtype=torch.bfloat16), None, "router logits.*missing"),
        (
            torch.zeros(5, 10, dtype=torch.bfloat16),
            torch.zeros(5, 5),
            r"router logits.*\[5, 6\].*not \[5, 5\]",
        ),
        (
            torch.zeros(5, 10, dtype=torch.bfloat16),
            torch.zeros(5, 6, dtype=torch.bfloat16),
            "router logits.*float32.*not.*bfloat16",
        ),
    ],
)
def test_tensors_that_do_not_fit(hidden, logits, message):
    source, _ = slots()
    with pytest.raises(ValueError, match=message):
        source.write(TRANSFER, hidden, logits)


def test_too_many_rows():
    source, target = slots()
    transfer = replace(TRANSFER, rows=10)
    with pytest.raises(ValueError, match="rows .*between 0 and 9, not 10"):
        source.write(transfer, *make_input(LAYOUT, transfer))
    with pytest.raises(ValueError, match="rows .*between 0 and 9, not 10"):
        target.clear(transfer)


def test_a_dtype_that_cannot_be_transferred():
    with pytest.raises(ValueError, match="hidden_dtype torch.int32.*supported"):
        HostFrameSlot(replace(LAYOUT, hidden_dtype=torch.int32), SESSION, True)


def test_in_and_out_of_inference_mode():
    with torch.inference_mode():
        source, target = slots()
        hidden_states, router_logits = make_input(LAYOUT, TRANSFER)
    nbytes = source.write(TRANSFER, hidden_states, router_logits)
    target.clear(TRANSFER)
    with torch.inference_mode():
        transmit(source, nbytes, target)
        hidden_view, _ = target.read(TRANSFER)
        assert torch.equal(hidden_view, hidden_states)
