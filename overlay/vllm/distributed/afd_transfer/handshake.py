# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The handshake of an AFD control connection.

    attention                          ffn
    AFDChallenge  ------------------>
                  <------------------  AFDChallenge
    AFDProof      ------------------>                 with a secret only
                  <------------------  AFDProof       with a secret only
    AFDHello      ------------------>
                  <------------------  AFDHello       once it serves no one else
    AFDReady      ------------------>

Either side may end it with AFDRefused. Both compare the hellos with the same function,
so that both report the same differences. With VLLM_AFD_SECRET set, nothing about the
model is told to a peer that has not proved that it knows the secret; attention proves
it first. What follows the handshake is neither encrypted nor signed: the network
between the roles has to be trusted.
"""

import contextlib
import hmac
import secrets
import time
from typing import TYPE_CHECKING, TypeVar, cast

import vllm.envs as envs
from vllm.distributed.afd_transfer.errors import AFDHandshakeError
from vllm.distributed.afd_transfer.messages import (
    AFD_PROTOCOL_VERSION,
    HEADER_SIZE,
    MAX_STAGES,
    NONCE_SIZE,
    AFDChallenge,
    AFDChannel,
    AFDHello,
    AFDLayerInfo,
    AFDMessage,
    AFDProof,
    AFDRefused,
    clean_text,
    decode,
    encode,
)
from vllm.version import __version__ as VLLM_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.afd import AFDRole

_M = TypeVar("_M", bound=AFDMessage)

# Compared for equality, in the order in which differences are reported.
_EQUAL_FIELDS = (
    "vllm_version",
    "num_attention_ranks",
    "num_ffn_ranks",
    "dtype",
    "hidden_size",
    "gate_placement",
    "connector",
)
# How many differences between two models are named.
_MAX_FACTS = 8


def make_hello(
    vllm_config: "VllmConfig",
    rank: int,
    model: dict[str, str],
    layers: list[AFDLayerInfo],
) -> AFDHello:
    """Describe this instance to the peer.

    Args:
        vllm_config: Config with an `afd_config`.
        rank: Rank within the role, dp_rank * tp_size + tp_rank.
        model: Facts that are equal on both roles if they serve the same model.
        layers: The model's MoE layers, in the order in which a step runs them.

    """
    config = vllm_config.afd_config
    if config is None:
        raise ValueError("make_hello needs a config with AFD (--afd-config).")
    model_config = vllm_config.model_config
    num_ubatches = vllm_config.parallel_config.num_ubatches
    return AFDHello(
        vllm_version=VLLM_VERSION,
        role=config.afd_role,
        rank=rank,
        num_attention_ranks=config.num_attention_ranks,
        num_ffn_ranks=config.num_ffn_ranks,
        model=model,
        dtype=str(model_config.dtype).removeprefix("torch."),
        hidden_size=model_config.get_hidden_size(),
        layers=layers,
        gate_placement=config.gate_placement,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        num_ubatches=MAX_STAGES if config.is_ffn else max(num_ubatches, 1),
        connector=config.afd_connector,
    )


def check_hello(hello: AFDHello) -> None:
    """Raise ValueError if a hello of ours is one that no peer would take."""
    try:
        decode(encode(hello)[HEADER_SIZE:], AFDHello)
    except ValueError as e:
        raise ValueError(f"AFD cannot describe this server to its peer: {e}") from None


def ffn_rank_of(attention_rank: int, num_ffn_ranks: int) -> int:
    """The FFN rank that serves an attention rank.

    With DP 1 on FFN and an equal TP size on both sides, it is the one with the same
    TP rank, so that the all-reduce on FFN adds up the same tokens.
    """
    return attention_rank % num_ffn_ranks


def compare_hellos(ours: AFDHello, theirs: AFDHello) -> list[str]:
    """Say where two peers do not fit together.

    Returns:
        A text for each difference, with the field and both values. The same on both
        sides. Empty if there is none.

    """
    if ours.role == theirs.role:
        return [f"role: both are {ours.role}"]
    attention, ffn = (ours, theirs) if ours.role == "attention" else (theirs, ours)

    def differ(field: str, on_attention: object, on_ffn: object) -> str:
        return f"{field}: attention has {on_attention!r}, ffn has {on_ffn!r}"

    mismatches = [
        differ(field, getattr(attention, field), getattr(ffn, field))
        for field in _EQUAL_FIELDS
        if getattr(attention, field) != getattr(ffn, field)
    ]
    facts = [
        differ(
            f"model {clean_text(name)}",
            attention.model.get(name),
            ffn.model.get(name),
        )
        for name in attention.model | ffn.model
        if attention.model.get(name) != ffn.model.get(name)
    ]
    mismatches += sorted(facts)[:_MAX_FACTS]
    if len(facts) > _MAX_FACTS:
        mismatches.append(f"{len(facts) - _MAX_FACTS} more facts of the model")
    if (
        attention.rank >= attention.num_attention_ranks
        or ffn.rank >= ffn.num_ffn_ranks
        or ffn.rank != ffn_rank_of(attention.rank, ffn.num_ffn_ranks)
    ):
        mismatches.append(differ("rank", attention.rank, ffn.rank))
    if attention.max_num_batched_tokens > ffn.max_num_batched_tokens:
        limits = attention.max_num_batched_tokens, ffn.max_num_batched_tokens
        text = differ("max_num_batched_tokens", *limits)
        mismatches.append(f"{text} (ffn's must not be smaller)")
    if not 1 <= attention.num_ubatches <= ffn.num_ubatches:
        mismatches.append(
            differ("num_ubatches", attention.num_ubatches, ffn.num_ubatches)
        )
    if len(attention.layers) != len(ffn.layers):
        mismatches.append(
            differ("number of layers", len(attention.layers), len(ffn.layers))
        )
    for i, (a, f) in enumerate(zip(attention.layers, ffn.layers)):
        if a != f:
            # One is enough: the rest follows from it more often than not.
            mismatches += [
                differ(f"layers[{i}].{field}", getattr(a, field), getattr(f, field))
                for field in a.__struct_fields__
                if getattr(a, field) != getattr(f, field)
            ]
            break
    return mismatches


def describe_mismatches(mismatches: list[str]) -> str:
    return "the two servers do not fit together: " + "; ".join(mismatches)


def get_secret() -> bytes | None:
    """The secret that both roles have to know, or None.

    Raises:
        ValueError: It is empty, which protects nothing.

    """
    secret = envs.VLLM_AFD_SECRET
    if secret is None:
        return None
    if not secret:
        raise ValueError(
            "VLLM_AFD_SECRET is set but empty. Set it to the same secret on both "
            "roles, or unset it on both."
        )
    return secret.encode()


def _mac(secret: bytes, role: str, attention_nonce: bytes, ffn_nonce: bytes) -> bytes:
    # The prover's role is part of it: a proof sent back to its author is no good.
    label = f"vllm-afd {AFD_PROTOCOL_VERSION} {role} ".encode()
    return hmac.digest(secret, label + attention_nonce + ffn_nonce, "sha256")


def send_refusal(channel: AFDChannel, reason: str) -> None:
    """Tell the peer why the handshake ends, if it still listens."""
    with contextlib.suppress(OSError):
        channel.send(AFDRefused(reason=clean_text(reason)), timeout_s=0)


def expect(
    channel: AFDChannel,
    message_type: type[_M],
    deadline: float,
    may_refuse: bool = True,
) -> _M:
    """Receive the next message of a handshake.

    Args:
        channel: Connection to the peer.
        message_type: What has to come.
        deadline: Time on the monotonic clock at which to give up, in seconds.
        may_refuse: Whether the peer may send a refusal instead, and a text with it.

    Raises:
        AFDHandshakeError: The peer refused.
        AFDProtocolError, OSError, EOFError: See `AFDChannel.recv`.

    """
    types = (message_type, AFDRefused) if may_refuse else (message_type,)
    message: AFDMessage = channel.recv(*types, timeout_s=deadline - time.monotonic())
    if isinstance(message, AFDRefused):
        raise AFDHandshakeError(f"it refused: {clean_text(message.reason)}")
    return cast(_M, message)


def authenticate(
    channel: AFDChannel, role: "AFDRole", secret: bytes | None, deadline: float
) -> None:
    """The first part of the handshake: both prove that they know the secret.

    Args:
        channel: Connection to a peer of which nothing is known yet.
        role: Our role.
        secret: The shared secret, or None if there is none.
        deadline: Time on the monotonic clock at which to give up, in seconds.

    Raises:
        AFDHandshakeError: The peer is not one to talk to. Says why.
        AFDProtocolError, OSError, EOFError: See `AFDChannel.recv`.

    """

    def send(message: AFDMessage) -> None:
        channel.send(message, timeout_s=deadline - time.monotonic())

    ours = AFDChallenge(
        protocol=AFD_PROTOCOL_VERSION,
        role=role,
        nonce=secrets.token_bytes(NONCE_SIZE),
        has_secret=secret is not None,
    )
    # FFN says nothing to who only connects.
    if role == "attention":
        send(ours)
        theirs = expect(channel, AFDChallenge, deadline)
        peer_role, nonces = "ffn", (ours.nonce, theirs.nonce)
    else:
        theirs = expect(channel, AFDChallenge, deadline, may_refuse=False)
        send(ours)
        peer_role, nonces = "attention", (theirs.nonce, ours.nonce)

    if theirs.protocol != ours.protocol:
        raise AFDHandshakeError(
            f"it speaks version {theirs.protocol} of the AFD protocol, "
            f"this {role} server version {ours.protocol}"
        )
    if theirs.role != peer_role:
        raise AFDHandshakeError(
            f"it has afd_role {theirs.role!r}, and so has this server"
        )
    if theirs.has_secret != ours.has_secret:
        here, there = ("set", "not set") if secret else ("not set", "set")
        raise AFDHandshakeError(
            f"VLLM_AFD_SECRET is {there} on its side ({theirs.role}), "
            f"but {here} on this one ({role})"
        )
    if secret is None:
        return

    def verify() -> None:
        # FFN lets no stranger write into its log.
        proof = expect(channel, AFDProof, deadline, may_refuse=role == "attention")
        if not hmac.compare_digest(proof.mac, _mac(secret, peer_role, *nonces)):
            send_refusal(channel, "VLLM_AFD_SECRET is not the same on both roles")
            raise AFDHandshakeError("its VLLM_AFD_SECRET is not the one of this server")

    if role == "ffn":
        verify()
    send(AFDProof(mac=_mac(secret, role, *nonces)))
    if role == "attention":
        verify()
