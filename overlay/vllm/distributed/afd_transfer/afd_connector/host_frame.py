# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The message of AFD connectors that hand tensors over in host memory.

A frame is, in one piece of memory:

    header         64 bytes: which transfer this is and what it carries
    hidden states  [rows, hidden_size]
    router logits  [rows, logits_size], from the next multiple of 64 bytes
    trailer        8 bytes, from the next multiple of 8 bytes

It is written to and read from a slot, which is as large as the largest frame and
reused for every transfer in one direction of one stage.
"""

import struct
from typing import Any

import torch

from vllm.distributed.afd_transfer.afd_connector.base import AFDLayout, AFDTransfer

_MAGIC = b"vAFD"
_VERSION = 1
_HEADER = struct.Struct("<4sIQQIIIIIIII")
_HEADER_FIELDS = (
    "magic",
    "version",
    "session",
    "seq",
    "layer",
    "stage",
    "num_stages",
    "rows",
    "hidden_size",
    "hidden_dtype",
    "logits_size",
    "logits_dtype",
)
_HEADER_NBYTES = 64
_NO_HEADER = bytes(_HEADER.size)
_TRAILER = struct.Struct("<Q")
_COMPLETE = 0x454D4152464B4F21
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class AFDFrameError(ValueError):
    """A frame is not the expected one. The message names what differs."""


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _dtype_code(name: str, dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise ValueError(
            f"{name} {dtype} cannot be transferred; supported: "
            f"{', '.join(map(str, _DTYPES))}"
        )
    return _DTYPES.index(dtype) + 1


class HostFrameSlot:
    """Memory for one frame, reused for each transfer.

    Args:
        layout: What an exchange can carry at most.
        session: Number that the sender puts into each frame, so that a frame of
            another session or sender is recognized.
        carries_logits: Whether frames carry the router logits of a transfer, as
            those to the FFN role do.

    Raises:
        ValueError: A dtype of the layout is not supported.

    """

    def __init__(self, layout: AFDLayout, session: int, carries_logits: bool) -> None:
        self.layout = layout
        self.session = session
        self.carries_logits = carries_logits
        self._hidden_dtype = _dtype_code("hidden_dtype", layout.hidden_dtype)
        self._logits_dtype = _dtype_code("logits_dtype", layout.logits_dtype)
        nbytes = self.slot_nbytes(layout, carries_logits)
        # Not an inference tensor: threads in and out of inference mode write it.
        with torch.inference_mode(False):
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._bytes = memoryview(self.buffer.numpy())
        # The layers of a step have frames of one shape: that of the last is kept.
        self._shape: tuple[int, int] | None = None
        self._hidden_view = self._logits_view = self.buffer
        self._trailer = 0

    @staticmethod
    def _offsets(layout: AFDLayout, rows: int, logits_size: int) -> tuple[int, int]:
        """Offsets of the router logits and the trailer."""
        hidden_nbytes = rows * layout.hidden_size * layout.hidden_dtype.itemsize
        logits_nbytes = rows * logits_size * layout.logits_dtype.itemsize
        logits = _round_up(_HEADER_NBYTES + hidden_nbytes, 64)
        return logits, _round_up(logits + logits_nbytes, 8)

    @classmethod
    def slot_nbytes(cls, layout: AFDLayout, carries_logits: bool) -> int:
        """Bytes of the largest frame."""
        logits_size = layout.logits_size if carries_logits else 0
        trailer = cls._offsets(layout, layout.max_tokens, logits_size)[1]
        return trailer + _TRAILER.size

    def _logits_size(self, transfer: AFDTransfer) -> int:
        return transfer.logits_size if self.carries_logits else 0

    def _set_shape(self, transfer: AFDTransfer) -> None:
        layout, rows, logits_size = (
            self.layout,
            transfer.rows,
            self._logits_size(transfer),
        )
        if self._shape == (rows, logits_size):
            return
        logits_start, self._trailer = self._offsets(layout, rows, logits_size)

        def view(start: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            end = start + rows * width * dtype.itemsize
            return self.buffer[start:end].view(dtype).view(rows, width)

        self._hidden_view = view(
            _HEADER_NBYTES, layout.hidden_size, layout.hidden_dtype
        )
        self._logits_view = view(logits_start, logits_size, layout.logits_dtype)
        self._shape = (rows, logits_size)

    def _header(self, transfer: AFDTransfer) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.session,
            transfer.seq,
            transfer.layer,
            transfer.stage,
            transfer.num_stages,
            transfer.rows,
            self.layout.hidden_size,
            self._hidden_dtype,
            self._logits_size(transfer),
            self._logits_dtype,
        )

    def write(
        self,
        transfer: AFDTransfer,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> int:
        """Write a frame.

        Args:
            transfer: What the frame is.
            hidden_states: [rows, hidden_size] in host memory, of any strides.
            router_logits: [rows, logits_size], or None if the frame carries none.

        Returns:
            Bytes of the frame.

        Raises:
            ValueError: The transfer does not fit the layout, or a tensor does not
                fit the transfer. The slot is unchanged.

        """
        transfer.check(self.layout)
        self._set_shape(transfer)
        _check_tensor("hidden states", hidden_states, self._hidden_view)
        if router_logits is not None:
            _check_tensor("router logits", router_logits, self._logits_view)
            self._logits_view.copy_(router_logits)
        elif logits_size := self._logits_size(transfer):
            raise ValueError(
                f"router logits of an AFD transfer are missing: logits_size is "
                f"{logits_size} ({transfer})"
            )
        self._hidden_view.copy_(hidden_states)
        self._bytes[: _HEADER.size] = self._header(transfer)
        _TRAILER.pack_into(self._bytes, self._trailer, _COMPLETE)
        return self._trailer + _TRAILER.size

    def clear(self, transfer: AFDTransfer) -> None:
        """Prepare the slot to receive a frame.

        Of what was read before, hidden states of as many rows stay until it comes.

        Raises:
            ValueError: The transfer does not fit the layout.

        """
        transfer.check(self.layout)
        self._set_shape(transfer)
        self._bytes[: _HEADER.size] = _NO_HEADER
        _TRAILER.pack_into(self._bytes, self._trailer, 0)

    def arrived(self) -> bool:
        """Whether the end of the frame that the slot was last cleared for is here.

        It then is all here, if the transport writes it in order.
        """
        return _TRAILER.unpack_from(self._bytes, self._trailer)[0] == _COMPLETE

    def read(self, transfer: AFDTransfer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Check the frame and return what it carries, without a copy.

        Args:
            transfer: What the slot was cleared for.

        Returns:
            hidden_states [rows, hidden_size] and router_logits
            [rows, logits_size] or None, as views of the slot.

        Raises:
            AFDFrameError: The frame is not of this transfer, or not complete.

        """
        expected = self._header(transfer)
        header = bytes(self._bytes[: _HEADER.size])
        if header != expected:
            raise AFDFrameError(f"wrong AFD frame: {_differences(header, expected)}")
        self._set_shape(transfer)
        if not self.arrived():
            raise AFDFrameError("truncated AFD frame: its end is missing")
        logits_view = self._logits_view if self._logits_size(transfer) else None
        return self._hidden_view, logits_view


def _check_tensor(name: str, tensor: torch.Tensor, view: torch.Tensor) -> None:
    if (
        tensor.shape == view.shape
        and tensor.dtype == view.dtype
        and tensor.device == view.device
    ):
        return
    raise ValueError(
        f"{name} of an AFD transfer must be {list(view.shape)}, {view.dtype} on "
        f"{view.device}, not {list(tensor.shape)}, {tensor.dtype} on {tensor.device}"
    )


def _differences(header: bytes, expected: bytes) -> str:
    """Name the fields in which two headers differ."""
    if header[: len(_MAGIC)] != _MAGIC:
        return "it does not start with a header"
    return "; ".join(
        f"{name} is {_describe(name, actual)}, expected {_describe(name, wanted)}"
        for name, actual, wanted in zip(
            _HEADER_FIELDS, _HEADER.unpack(header), _HEADER.unpack(expected)
        )
        if actual != wanted
    )


def _describe(name: str, value: Any) -> str:
    if name.endswith("_dtype") and 1 <= value <= len(_DTYPES):
        return str(_DTYPES[value - 1])
    return str(value)
