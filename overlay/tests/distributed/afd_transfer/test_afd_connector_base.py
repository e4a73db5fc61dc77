# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDLayout,
    AFDTransfer,
)
from vllm.distributed.afd_transfer.errors import AFDError, AFDPeerError

from .utils import FFN_PEER, make_config

pytestmark = pytest.mark.skip_global_cleanup

LAYOUT = AFDLayout(16, 2, 8, torch.bfloat16, logits_size=4)


class _Connector(AFDConnectorBase):
    interrupts = 0

    def connect(self, exchange_blob, local_address, timeout_s): ...

    def submit(self, transfer, hidden_states, router_logits=None): ...

    def post_recv(self, transfer): ...

    def recv(self, transfer, may_compile=False): ...

    def send(self, transfer, output): ...

    def interrupt(self):
        # check() raises already, for those whom this wakes.
        with pytest.raises(AFDPeerError):
            self.check()
        self.interrupts += 1

    def close(self): ...


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("num_stages", 0),
        ("num_stages", 3),
        ("hidden_size", 0),
        ("logits_size", -1),
    ],
)
def test_layout_names_what_is_out_of_range(field: str, value: int):
    values = {**vars(LAYOUT), field: value}
    with pytest.raises(ValueError, match=f"{field}.*not {value}"):
        AFDLayout(**values)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("seq", -1, r"between 0 and \d+"),
        ("seq", 2**64, r"between 0 and \d+"),
        ("layer", -1, r"between 0 and \d+"),
        ("stage", 2, "between 0 and 1"),
        ("num_stages", 3, "between 1 and 2"),
        ("num_stages", 0, "between 1 and 2"),
        ("rows", -1, "between 0 and 16"),
        ("rows", 17, "between 0 and 16"),
        ("logits_size", 5, "between 0 and 4"),
    ],
)
def test_transfer_names_what_does_not_fit(field: str, value: int, allowed: str):
    values = dict(seq=1, layer=0, stage=0, num_stages=2, rows=16, logits_size=4)
    AFDTransfer(**values).check(LAYOUT)
    with pytest.raises(ValueError, match=f"{field} .*{allowed}, not {value}"):
        AFDTransfer(**{**values, field: value}).check(LAYOUT)


def test_the_first_error_ends_the_session():
    connector = _Connector(make_config(), "attention", LAYOUT, FFN_PEER)
    connector.check()
    first = AFDPeerError("died")
    connector.abort(first)
    connector.abort(AFDError("closed"))
    assert connector.interrupts == 1
    for _ in range(2):
        with pytest.raises(AFDPeerError) as raised:
            connector.check()
        assert raised.value is first


@pytest.mark.parametrize(
    ("connect_timeout_s", "limit"),
    [(90, (90, "connect_timeout_s=90")), (20, (30, "step_timeout_s=30"))],
)
def test_a_peer_that_may_compile_gets_more_time(connect_timeout_s, limit):
    config = make_config(step_timeout_s=30, connect_timeout_s=connect_timeout_s)
    connector = _Connector(config, "ffn", LAYOUT, FFN_PEER)
    assert connector.recv_limit(may_compile=False) == (30, "step_timeout_s=30")
    assert connector.recv_limit(may_compile=True) == limit


def test_a_config_is_needed():
    config = make_config()
    config.afd_config = None
    with pytest.raises(ValueError, match="afd_config must be set"):
        _Connector(config, "attention", LAYOUT, FFN_PEER)
