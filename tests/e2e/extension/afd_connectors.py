"""An AFD connector from outside vLLM, which can be told to hand over wrong answers.

`afd_connector_module_path` names this module, with this folder in `PYTHONPATH`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.distributed.afd_transfer.afd_connector.base import AFDRecvHandle, AFDTransfer
from vllm.distributed.afd_transfer.afd_connector.gloo_connector import (
    GlooAFDConnector,
)


class FaultyConnector(GlooAFDConnector):
    """As gloo's, unless `fault` is set on the attention role.

    Attributes:
        fault: `swapped_stages`: each stage of a split step gets the other's answer,
            where both have as many rows. `last_layer`: a layer gets the answer of
            the layer before it. None: nothing is wrong.
    """

    fault: str | None = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # By stage and layer.
        self._answers: dict[tuple[int, int], _Answer] = {}
        self._last: dict[int, torch.Tensor] = {}

    def submit(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> AFDRecvHandle:
        handle = super().submit(transfer, hidden_states, router_logits)
        answer = _Answer(self, transfer, handle)
        self._answers[transfer.stage, transfer.layer] = answer
        return answer

    def spoil(self, answer: _Answer) -> torch.Tensor:
        """What is handed over in place of an answer."""
        transfer, output = answer.transfer, answer.receive()
        last, self._last[transfer.stage] = self._last.get(transfer.stage), output
        if self.fault == "last_layer" and transfer.layer > 0:
            return last.clone()
        if self.fault == "swapped_stages" and transfer.num_stages == 2:
            # Stage 0 waits for a layer once stage 1 has submitted it too.
            other = self._answers[1 - transfer.stage, transfer.layer]
            if other.transfer.rows == transfer.rows:
                return other.receive().clone()
        return output


@dataclass
class _Answer(AFDRecvHandle):
    connector: FaultyConnector
    transfer: AFDTransfer
    handle: AFDRecvHandle
    output: torch.Tensor | None = field(default=None)

    def done(self) -> bool:
        return self.output is not None or self.handle.done()

    def receive(self) -> torch.Tensor:
        """The right answer; may be called several times."""
        if self.output is None:
            self.output = self.handle.wait()
        return self.output

    def wait(self) -> torch.Tensor:
        return self.connector.spoil(self)
