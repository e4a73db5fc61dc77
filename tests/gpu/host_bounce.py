"""An AFD connector for tests: gloo's, for tensors on any device.

It lets both roles share one GPU, which NCCL does not allow. Tensors go by way of host
memory. `afd_connector_module_path` names this module, with this folder in `PYTHONPATH`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.afd_transfer.afd_connector.base import AFDRecvHandle, AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.gloo_connector import (
    GlooAFDConnector,
)
from vllm.platforms import current_platform

HOST = torch.device("cpu")


class HostBounceAFDConnector(GlooAFDConnector):
    """Copies to the host before it sends, and to the device after it has received.

    Both wait for the device: nothing is left in flight there. Where the host is the
    device, nothing is copied, and it is gloo's connector.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # What gloo sends and receives, whatever the default device is.
        with HOST:
            super().__init__(*args, **kwargs)
        self._device = torch.device(current_platform.device_type)

    def connect(
        self,
        exchange_blob: Callable[[bytes], bytes],
        local_address: str,
        timeout_s: float,
    ) -> None:
        with HOST:
            super().connect(exchange_blob, local_address, timeout_s)

    def submit(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> AFDRecvHandle:
        handle = super().submit(
            transfer, _moved(hidden_states, HOST), _moved(router_logits, HOST)
        )
        return _Answer(handle, hidden_states.device)

    def recv(
        self, transfer: AFDTransfer, may_compile: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, router_logits = super().recv(transfer, may_compile)
        return _moved(hidden_states, self._device), _moved(router_logits, self._device)

    def send(self, transfer: AFDTransfer, output: torch.Tensor) -> None:
        super().send(transfer, _moved(output, HOST))


class _Answer(AFDRecvHandle):
    def __init__(self, handle: AFDRecvHandle, device: torch.device) -> None:
        self._handle = handle
        self._device = device

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> torch.Tensor:
        return _moved(self._handle.wait(), self._device)


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
