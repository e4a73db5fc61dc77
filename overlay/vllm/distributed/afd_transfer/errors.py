# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Errors of attention-FFN disaggregation (AFD)."""


class AFDError(RuntimeError):
    """Base of the errors that end an AFD session."""


class AFDPeerError(AFDError):
    """The peer died, hung or broke the protocol.

    The message names the peer, what was being done, and the cause.
    """


class AFDHandshakeError(AFDError):
    """The peer was refused, refused us, or is configured differently."""
