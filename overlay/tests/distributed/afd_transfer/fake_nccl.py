# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two devices within this process, with streams, and NCCL between them.

What is given to a stream runs later, in its order, in a thread. A message is a
rendezvous: neither side goes on before it is the first thing on a stream of both. The
streams take turns at random, but what can run stays able to run whatever else does, so
that a deadlock does not depend on the turns.
"""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.distributed.afd_transfer.afd_connector import nccl_link
from vllm.v1.worker import ubatching

from .utils import SOON_S

_UNIQUE_ID_BYTES = 128


class _Op:
    name = "compute"

    def __init__(self, run: Callable[[], Any], ready: Callable[[], bool]):
        self.run = run
        self.ready = ready


class FakeEvent:
    def __init__(self, *args: Any, **kwargs: Any):
        self._mark: list[bool] = [True]

    def record(self, stream: "FakeStream") -> None:
        mark = self._mark = [False]
        stream.add(lambda: mark.__setitem__(0, True))

    def query(self) -> bool:
        return self._mark[0]


class FakeStream:
    def __init__(self, device: "FakeDevice"):
        self.device = device
        self.ops: deque[Any] = deque()
        device.streams.append(self)

    def add(self, run: Callable[[], Any], ready: Callable[[], bool] | None = None):
        self.push(_Op(run, ready or (lambda: True)))

    def push(self, op: Any) -> None:
        with self.device.world.changed:
            self.ops.append(op)
            self.device.world.changed.notify_all()

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return not self.ops

    def synchronize(self) -> None:
        world = self.device.world
        with world.changed:
            if not world.changed.wait_for(lambda: world.closed or not self.ops, SOON_S):
                raise TimeoutError("the stream is blocked")
            if world.closed:
                raise RuntimeError("the world has ended")

    def wait_event(self, event: FakeEvent) -> None:
        mark = event._mark
        self.add(lambda: None, lambda: mark[0])

    def wait_stream(self, stream: "FakeStream") -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)


class FakeDevice:
    def __init__(self, world: "FakeWorld", name: str):
        self.world = world
        self.name = name
        # As of a process that was stopped, together with its device.
        self.frozen = False
        self.broken = False
        self.streams: list[FakeStream] = []
        self.compute_stream = FakeStream(self)


class _Message:
    """What a group of sends or receives puts on a stream."""

    def __init__(self, comm: "FakeCommunicator", kind: str, tensors: list):
        self.comm = comm
        self.name = kind
        self.tensors = tensors

    def _partner(self) -> "tuple[FakeStream, _Message] | None":
        peer = self.comm.peer()
        if peer is None or peer.aborted or peer.device_fake.frozen:
            return None
        for stream in peer.device_fake.streams:
            op = stream.ops[0] if stream.ops else None
            if isinstance(op, _Message) and op.comm is peer and op.name != self.name:
                return stream, op
        return None

    def ready(self) -> bool:
        return self.comm.aborted or self._partner() is not None

    def run(self) -> None:
        if self.comm.aborted:
            return
        partner = self._partner()
        assert partner is not None
        stream, other = partner
        stream.ops.popleft()
        sent, received = (self, other) if self.name == "send" else (other, self)
        sizes = [[t.nbytes for t in side.tensors] for side in (sent, received)]
        if sizes[0] != sizes[1]:
            self.comm.world.mismatches.append(sizes)
            return
        for source, target in zip(sent.tensors, received.tensors):
            target.copy_(source)
        self.comm.world.num_messages += 1


class FakeCommunicator:
    """Stands for PyNcclCommunicator."""

    world: "FakeWorld"

    def __init__(self, unique_id: bytes, rank: int, device: FakeDevice):
        self.unique_id = unique_id
        self.rank = rank
        self.device = SimpleNamespace(index=0)
        self.device_fake = device
        self.disabled = self.world.disabled
        self.comm = self
        self.nccl = self
        self.aborted = False
        self.aborted_by: str | None = None
        self._group: list | None = None

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id: bytes, rank: int, world_size: int, device: torch.device
    ) -> "FakeCommunicator":
        assert len(unique_id) == _UNIQUE_ID_BYTES and world_size == 2
        world = cls.world
        comm = cls(unique_id, rank, world.current_stream().device)
        with world.changed:
            assert (unique_id, rank) not in world.comms
            world.comms[unique_id, rank] = comm
            world.changed.notify_all()
            world.changed.wait_for(
                lambda: world.closed or comm.disabled or comm.peer() is not None
            )
            if world.closed:
                raise RuntimeError("NCCL error: remote process exited")
        return comm

    def peer(self) -> "FakeCommunicator | None":
        return self.world.comms.get((self.unique_id, 1 - self.rank))

    def group_start(self) -> None:
        assert self._group is None
        self._group = []

    def send(self, tensor: torch.Tensor, rank: int, stream: FakeStream) -> None:
        self._add("send", tensor, rank, stream)

    def recv(self, tensor: torch.Tensor, rank: int, stream: FakeStream) -> None:
        self._add("recv", tensor, rank, stream)

    def _add(self, kind: str, tensor: torch.Tensor, rank: int, stream: FakeStream):
        assert rank == 1 - self.rank and not self.aborted
        assert stream.device is self.device_fake
        assert tensor.is_contiguous() and tensor.numel() > 0
        if self.world.nccl_error is not None:
            raise RuntimeError(self.world.nccl_error)
        assert self._group is not None
        self._group.append((kind, tensor, stream))

    def group_end(self) -> None:
        group, self._group = self._group, None
        if not group:
            return
        ((kind, stream),) = {(kind, stream) for kind, _, stream in group}
        stream.push(_Message(self, kind, [tensor for _, tensor, _ in group]))

    def ncclCommAbort(self, comm: "FakeCommunicator") -> None:
        self.aborted_by = threading.current_thread().name
        if self.world.abort_hangs:
            self.world.ended.wait(SOON_S)
            return
        with self.world.changed:
            self.aborted = True
            self.world.changed.notify_all()


class FakeNccl:
    """Stands for NCCLLibrary."""

    version = "2.30.1"
    num_ids = 0

    def ncclGetVersion(self) -> str:
        return self.version

    def ncclGetUniqueId(self) -> Any:
        FakeNccl.num_ids += 1
        return SimpleNamespace(
            internal=FakeNccl.num_ids.to_bytes(_UNIQUE_ID_BYTES, "big")
        )


class _LaunchMode(TorchDispatchMode):
    """What torch computes is put on the current stream. Until that comes to it, the
    result is not a number."""

    def __init__(self, world: "FakeWorld"):
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        stream = self.world.current_stream()
        arguments = func._schema.arguments
        if any(a.alias_info and a.alias_info.is_write for a in arguments):
            stream.add(lambda: func(*args, **kwargs))
            return args[0]
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or any(
            isinstance(arg, torch.Tensor)
            and arg.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            for arg in args
        ):
            return result
        result.fill_(float("nan"))
        if not func.__name__.startswith("empty"):
            stream.add(lambda: result.copy_(func(*args, **kwargs)))
        return result


class FakeWorld:
    """Two processes with a device each, named as the roles."""

    def __init__(self, seed: int = 0):
        self.changed = threading.Condition()
        self.closed = False
        self.ended = threading.Event()
        self.comms: dict[tuple[bytes, int], FakeCommunicator] = {}
        self.mismatches: list = []
        self.num_messages = 0
        self.disabled = self.abort_hangs = False
        self.nccl_error: str | None = None
        self.num_exits = 0
        self.devices = {name: FakeDevice(self, name) for name in ("attention", "ffn")}
        self._local = threading.local()
        self._rng = random.Random(seed)
        self._pump = threading.Thread(target=self._run, daemon=True)
        self._pump.start()

    def _run(self) -> None:
        with torch.inference_mode(), self.changed:
            while not self.closed:
                ready = [
                    stream
                    for device in self.devices.values()
                    if not device.frozen
                    for stream in device.streams
                    if stream.ops and stream.ops[0].ready()
                ]
                if not ready:
                    self.changed.wait()
                    continue
                self._rng.choice(ready).ops.popleft().run()
                self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.ended.set()
        self._pump.join(SOON_S)
        assert not self._pump.is_alive()

    def freeze(self, name: str, frozen: bool = True) -> None:
        with self.changed:
            self.devices[name].frozen = frozen
            self.changed.notify_all()

    def blocked(self, name: str) -> list[str]:
        """What the streams of a device wait with, if it is messages."""
        with self.changed:
            return [
                stream.ops[0].name
                for stream in self.devices[name].streams
                if stream.ops and isinstance(stream.ops[0], _Message)
            ]

    def current_stream(self) -> FakeStream:
        return self._local.stream

    def set_stream(self, stream: FakeStream) -> None:
        self._local.stream = stream

    @contextlib.contextmanager
    def process(self, name: str) -> Iterator[FakeDevice]:
        """Makes this thread one of that process. What it computes runs later."""
        device = self.devices[name]
        self.set_stream(device.compute_stream)
        with torch.inference_mode(), _LaunchMode(self):
            yield device

    def _exit(self) -> None:
        self.num_exits += 1

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comm_cls = type("FakeCommunicator", (FakeCommunicator,), {"world": self})
        for module, name, value in (
            (torch.cuda, "Stream", lambda: FakeStream(self.current_stream().device)),
            (torch.cuda, "Event", FakeEvent),
            (torch, "Event", FakeEvent),
            (torch.accelerator, "set_device_index", lambda device: None),
            (torch.cuda, "set_stream", self.set_stream),
            (torch.accelerator, "device_index", lambda i: contextlib.nullcontext()),
            (ubatching, "current_stream", self.current_stream),
            (nccl_link, "PyNcclCommunicator", comm_cls),
            (nccl_link, "NCCLLibrary", FakeNccl),
            (nccl_link, "_current_device", lambda: torch.device("cpu")),
            (nccl_link, "_gpu_uuid", lambda _: self.current_stream().device.name),
            (nccl_link, "_pin_interface", lambda address: None),
            (nccl_link, "_end_process", self._exit),
        ):
            monkeypatch.setattr(module, name, value)


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@contextlib.contextmanager
def fake_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorld]:
    world = FakeWorld()
    world.patch(monkeypatch)
    try:
        yield world
    finally:
        world.close()
    assert not world.mismatches
