# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The order in which the AFD FFN role computes for its attention ranks."""

import collections
import threading
from typing import Any


class AFDTurns:
    """A lock that goes round: who asked first gets it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._queue: collections.deque[threading.Lock] = collections.deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        # As long as those ahead run a layer each.
        turn.acquire()

    def __exit__(self, *exc_info: Any) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._is_taken = False
