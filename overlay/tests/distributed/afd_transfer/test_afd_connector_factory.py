# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import subprocess
import sys

import pytest
import torch

from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout
from vllm.distributed.afd_transfer.afd_connector.factory import AFDConnectorFactory

from .utils import FFN_PEER, Step, connected_pair, make_config, run_steps

pytestmark = pytest.mark.skip_global_cleanup

LAYOUT = AFDLayout(16, 2, 8, torch.float32, logits_size=4)

# What somebody outside vLLM would write: it knows the base class only, and has no
# host frames, no threads and no sockets.
THIRD_PARTY_CONNECTOR = """
import queue
import threading

from vllm.distributed.afd_transfer.afd_connector.base import (
    AFDConnectorBase,
    AFDRecvHandle,
)

_mailboxes = {}


class _Handle(AFDRecvHandle):
    def __init__(self, connector, transfer):
        self.connector = connector
        self.transfer = transfer

    def done(self):
        return not self.connector.inbox[self.transfer.stage].empty()

    def wait(self):
        return self.connector.take(self.transfer)


class MailboxConnector(AFDConnectorBase):
    closed = False

    def connect(self, exchange_blob, local_address, timeout_s):
        self.inbox = [queue.Queue() for _ in range(self.layout.num_stages)]
        name = f"{self.role} {id(self)}".encode()
        _mailboxes[name] = self.inbox
        self.outbox = _mailboxes[exchange_blob(name)]

    def take(self, transfer):
        item = self.inbox[transfer.stage].get(
            timeout=self.afd_config.step_timeout_s
        )
        self.check()
        sent, *tensors = item
        assert sent == transfer
        return tensors[0] if self.role == "attention" else tuple(tensors)

    def submit(self, transfer, hidden_states, router_logits=None):
        self.check()
        self.outbox[transfer.stage].put((transfer, hidden_states, router_logits))
        return _Handle(self, transfer)

    def post_recv(self, transfer):
        self.check()

    def recv(self, transfer, may_compile=False):
        return self.take(transfer)

    def send(self, transfer, output):
        self.check()
        self.outbox[transfer.stage].put((transfer, output))

    def interrupt(self):
        for stage in self.inbox:
            stage.put(None)

    def close(self):
        self.closed = True


class NotAConnector:
    pass


not_even_a_class = 1
"""


@pytest.fixture
def third_party_module(tmp_path, monkeypatch) -> str:
    name = "third_party_afd_connector"
    (tmp_path / f"{name}.py").write_text(THIRD_PARTY_CONNECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.fixture
def registered(monkeypatch, third_party_module) -> str:
    """A connector of the registry, which is otherwise as it is."""
    registry = dict(AFDConnectorFactory._registry)
    monkeypatch.setattr(AFDConnectorFactory, "_registry", registry)
    AFDConnectorFactory.register_connector(
        "RegisteredConnector", third_party_module, "MailboxConnector"
    )
    return "RegisteredConnector"


def test_a_registered_connector_is_loaded_when_it_is_asked_for(
    registered, third_party_module
):
    assert third_party_module not in sys.modules
    connector = AFDConnectorFactory.create_connector(
        make_config(registered), "ffn", LAYOUT, FFN_PEER
    )
    assert type(connector) is sys.modules[third_party_module].MailboxConnector
    assert connector.peer == FFN_PEER


def test_connectors_are_loaded_lazily():
    code = (
        "import sys; import vllm.distributed.afd_transfer.afd_connector.factory; "
        "sys.exit(any('gloo_connector' in name for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_lists_what_there_is(registered):
    with pytest.raises(ValueError) as error:
        AFDConnectorFactory.create_connector(
            make_config("NoSuchConnector"), "ffn", LAYOUT, FFN_PEER
        )
    for part in (
        "afd_connector 'NoSuchConnector'",
        registered,
        "afd_connector_module_path",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("connector", "module_path", "message"),
    [
        ("X", "no_such_module_anywhere", "afd_connector_module_path 'no_such_module"),
        ("X", ".x", "afd_connector_module_path '.x' cannot be imported"),
        ("X", "", "afd_connector_module_path '' cannot be imported"),
        ("X", None, "has no connector 'X'"),
        # The path says where a connector is from, also for a registered name.
        ("RegisteredConnector", None, "has no connector 'RegisteredConnector'"),
        ("NotAConnector", None, "must be a subclass of AFDConnectorBase"),
        ("not_even_a_class", None, "must be a subclass of AFDConnectorBase"),
    ],
)
def test_a_module_path_that_does_not_work(
    registered, third_party_module, connector, module_path, message
):
    if module_path is None:
        module_path = third_party_module
    config = make_config(connector, module_path)
    with pytest.raises(ValueError, match=message):
        AFDConnectorFactory.create_connector(config, "ffn", LAYOUT, FFN_PEER)


def test_without_a_config():
    config = make_config()
    config.afd_config = None
    with pytest.raises(ValueError, match="afd_config must be set"):
        AFDConnectorFactory.create_connector(config, "ffn", LAYOUT, FFN_PEER)


def test_a_name_is_registered_once(registered):
    with pytest.raises(ValueError, match=f"'{registered}' is already registered"):
        AFDConnectorFactory.register_connector(registered, "module", "class")


def test_a_connector_outside_vllm_serves_steps(third_party_module):
    config = make_config("MailboxConnector", third_party_module)
    with connected_pair(LAYOUT, config) as (attention, ffn):
        assert type(attention).__module__ == third_party_module
        steps = [Step(1, [5], [4, 0, 4]), Step(2, [3, 4], [4, 0, 4])]
        run_steps(attention, ffn, steps)
    assert attention.closed and ffn.closed
