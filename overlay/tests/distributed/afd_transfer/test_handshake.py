# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import hmac
import secrets
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from vllm.config.afd import AFDConfig
from vllm.distributed.afd_transfer import handshake
from vllm.distributed.afd_transfer.errors import AFDHandshakeError
from vllm.distributed.afd_transfer.handshake import (
    authenticate,
    compare_hellos,
    expect,
    ffn_rank_of,
    get_secret,
    make_hello,
    send_refusal,
)
from vllm.distributed.afd_transfer.messages import (
    AFD_PROTOCOL_VERSION,
    AFDChallenge,
    AFDHello,
    AFDLayerInfo,
    AFDProof,
    AFDProtocolError,
    AFDRefused,
    encode,
)

from .message_utils import TIMEOUT_S, background, channel_pair, hello, repeat, step

pytestmark = [
    pytest.mark.skip_global_cleanup,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_leaks"),
]

LAYERS = hello("ffn").layers


def layer(i: int, **kwargs) -> AFDLayerInfo:
    fields = {f: getattr(LAYERS[i], f) for f in AFDLayerInfo.__struct_fields__}
    return AFDLayerInfo(**(fields | kwargs))


# Field of the hello, what FFN has in it, and the text for it.
MISMATCHES = [
    (
        "vllm_version",
        "0.30.1",
        "vllm_version: attention has '0.30.0', ffn has '0.30.1'",
    ),
    (
        "num_attention_ranks",
        2,
        "num_attention_ranks: attention has 1, ffn has 2",
    ),
    ("num_ffn_ranks", 2, "num_ffn_ranks: attention has 1, ffn has 2"),
    ("rank", 1, "rank: attention has 0, ffn has 1"),
    (
        "model",
        {"architecture": "Moe", "weights": "f00d"},
        "model weights: attention has 'cafe', ffn has 'f00d'",
    ),
    (
        "model",
        {"architecture": "Moe", "weights": "cafe", "config.top_k": "2"},
        "model config.top_k: attention has None, ffn has '2'",
    ),
    ("dtype", "float32", "dtype: attention has 'bfloat16', ffn has 'float32'"),
    ("hidden_size", 65, "hidden_size: attention has 64, ffn has 65"),
    (
        "gate_placement",
        "attention",
        "gate_placement: attention has 'auto', ffn has 'attention'",
    ),
    (
        "max_num_batched_tokens",
        64,
        "max_num_batched_tokens: attention has 128, ffn has 64 (ffn's must not be "
        "smaller)",
    ),
    ("num_ubatches", 1, "num_ubatches: attention has 2, ffn has 1"),
    (
        "connector",
        "Other",
        "connector: attention has 'GlooAFDConnector', ffn has 'Other'",
    ),
    ("layers", LAYERS[:1], "number of layers: attention has 2, ffn has 1"),
    (
        "layers",
        [LAYERS[0], layer(1, name="x")],
        "layers[1].name: attention has 'model.layers.1.mlp', ffn has 'x'",
    ),
    (
        "layers",
        [layer(0, gate_on_ffn=False), LAYERS[1]],
        "layers[0].gate_on_ffn: attention has True, ffn has False",
    ),
    (
        "layers",
        [LAYERS[0], layer(1, logits_size=9)],
        "layers[1].logits_size: attention has 8, ffn has 9",
    ),
    (
        "layers",
        [LAYERS[0], layer(1, logits_dtype="bfloat16")],
        "layers[1].logits_dtype: attention has 'float32', ffn has 'bfloat16'",
    ),
    ("role", "attention", "role: both are attention"),
]


def test_every_field_of_the_hello_is_compared():
    assert {field for field, _, _ in MISMATCHES} == set(AFDHello.__struct_fields__)


def test_equal_hellos_fit():
    assert compare_hellos(hello("attention"), hello("ffn")) == []
    assert compare_hellos(hello("ffn"), hello("attention")) == []


@pytest.mark.parametrize("field,value,text", MISMATCHES)
def test_mismatch_has_the_same_text_on_both_sides(field, value, text):
    attention, ffn = hello("attention"), hello("ffn", **{field: value})
    assert compare_hellos(attention, ffn) == [text]
    assert compare_hellos(ffn, attention) == [text]


def test_quite_another_model_is_described_shortly():
    model = {f"config.{name}": name for name in "abcdefghijkl"}
    attention = hello("attention", model=model)
    ffn = hello("ffn", model=dict.fromkeys(model, "other"))
    mismatches = compare_hellos(attention, ffn)
    assert mismatches == compare_hellos(ffn, attention)
    assert mismatches[0] == "model config.a: attention has 'a', ffn has 'other'"
    assert mismatches[8:] == ["4 more facts of the model"]


def test_a_peer_cannot_write_lines_into_the_log():
    facts = {"a\nERROR \x1b[31m": "b\nc\x1b[31m"}
    for ours, theirs in (("attention", "ffn"), ("ffn", "attention")):
        (mismatch,) = compare_hellos(hello(ours, model={}), hello(theirs, model=facts))
        assert mismatch.startswith("model a ERROR ?[31m: ")
        assert mismatch.isprintable()


def test_all_mismatches_are_named_at_once():
    attention = hello("attention")
    ffn = hello("ffn", dtype="float32", hidden_size=1, layers=LAYERS[1:], model={})
    mismatches = compare_hellos(attention, ffn)
    fields = [mismatch.split(":")[0] for mismatch in mismatches]
    # Of the layers, the first that differs, in all that differs.
    names = ["dtype", "hidden_size", "model architecture", "model weights"]
    assert fields == names + ["number of layers"] + [
        f"layers[0].{field}" for field in AFDLayerInfo.__struct_fields__
    ]


@pytest.mark.parametrize(
    "on_attention,on_ffn,fits",
    [(1, 1, True), (1, 2, True), (2, 2, True), (2, 1, False), (0, 2, False)],
)
def test_attention_may_use_fewer_ubatches_than_ffn_takes(on_attention, on_ffn, fits):
    attention = hello("attention", num_ubatches=on_attention)
    ffn = hello("ffn", num_ubatches=on_ffn)
    assert (compare_hellos(attention, ffn) == []) == fits


def test_ffn_may_take_larger_steps_than_attention_makes():
    ffn = hello("ffn", max_num_batched_tokens=16384)
    assert compare_hellos(hello("attention"), ffn) == []
    assert compare_hellos(ffn, hello("attention")) == []


@pytest.mark.parametrize("num_attention,num_ffn", [(1, 1), (2, 1), (4, 2), (8, 8)])
def test_each_ffn_rank_serves_the_attention_ranks_of_its_tp_rank(
    num_attention, num_ffn
):
    served: dict[int, list[int]] = {rank: [] for rank in range(num_ffn)}
    for rank in range(num_attention):
        served[ffn_rank_of(rank, num_ffn)].append(rank)
    tp_size = num_ffn  # DP 1 on FFN, TP equal on both sides.
    for ffn_rank, ranks in served.items():
        dp_size = num_attention // tp_size
        assert ranks == [dp * tp_size + ffn_rank for dp in range(dp_size)]

    counts = {"num_attention_ranks": num_attention, "num_ffn_ranks": num_ffn}
    for attention_rank in range(num_attention + 1):
        attention = hello("attention", rank=attention_rank, **counts)
        for ffn_rank in range(num_ffn + 1):
            ffn = hello("ffn", rank=ffn_rank, **counts)
            fits = attention_rank in served.get(ffn_rank, [])
            assert (compare_hellos(attention, ffn) == []) == fits


def vllm_config(role: str, num_ubatches: int = 1, **extra) -> SimpleNamespace:
    return SimpleNamespace(
        afd_config=AFDConfig(afd_role=role, afd_connector_extra_config=extra),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, get_hidden_size=lambda: 2048
        ),
        parallel_config=SimpleNamespace(num_ubatches=num_ubatches),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
    )


@pytest.mark.parametrize("num_ubatches", [1, 2])
def test_hello_of_a_config(num_ubatches):
    # Any value goes to the connector, and each host may need its own.
    config = vllm_config("attention", num_ubatches, interface=object(), b={1, 2})
    attention = make_hello(config, 0, {"weights": "cafe"}, LAYERS)
    assert attention.role == "attention"
    assert attention.num_ubatches == num_ubatches
    assert attention.dtype == "bfloat16"
    assert attention.hidden_size == 2048
    assert attention.max_num_batched_tokens == 4096
    # FFN needs no DBO flags to serve two stages.
    ffn = make_hello(
        vllm_config("ffn", interface="eth1"), 0, {"weights": "cafe"}, LAYERS
    )
    assert compare_hellos(attention, ffn) == []


def test_hello_needs_afd():
    config = vllm_config("ffn")
    config.afd_config = None
    with pytest.raises(ValueError, match="--afd-config"):
        make_hello(config, 0, {}, [])


def deadline() -> float:
    return time.monotonic() + TIMEOUT_S


def run_authenticate(attention_secret, ffn_secret):
    """Returns what came of it on attention and on FFN: None or the error."""
    with channel_pair() as (left, right):
        ends = [
            background(authenticate, left, "attention", attention_secret, deadline()),
            background(authenticate, right, "ffn", ffn_secret, deadline()),
        ]
        return tuple(end.exception(TIMEOUT_S) for end in ends)


@pytest.mark.parametrize("secret", [None, b"s", b"\x00" * 1000])
@repeat(30)
def test_equal_secrets(secret):
    assert run_authenticate(secret, secret) == (None, None)


@repeat(30)
def test_different_secrets_are_named_on_both_sides():
    on_attention, on_ffn = run_authenticate(b"one", b"other")
    assert isinstance(on_attention, AFDHandshakeError)
    assert "refused: VLLM_AFD_SECRET is not the same on both" in str(on_attention)
    assert isinstance(on_ffn, AFDHandshakeError)
    assert "its VLLM_AFD_SECRET is not the one of this server" in str(on_ffn)
    for error in (on_attention, on_ffn):
        assert "one'" not in str(error) and "other" not in str(error)


@pytest.mark.parametrize("with_secret", ["attention", "ffn"])
@repeat(30)
def test_secret_on_one_side_only(with_secret):
    errors = run_authenticate(
        b"s" if with_secret == "attention" else None,
        b"s" if with_secret == "ffn" else None,
    )
    for role, peer, error in zip(("attention", "ffn"), ("ffn", "attention"), errors):
        here, there = ("set", "not set") if role == with_secret else ("not set", "set")
        assert isinstance(error, AFDHandshakeError)
        assert (
            f"VLLM_AFD_SECRET is {there} on its side ({peer}), "
            f"but {here} on this one ({role})"
        ) in str(error)


def challenge(role: str, **kwargs) -> AFDChallenge:
    fields = dict(
        protocol=AFD_PROTOCOL_VERSION,
        role=role,
        nonce=secrets.token_bytes(32),
        has_secret=True,
    )
    return AFDChallenge(**(fields | kwargs))


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_protocol_version_is_named_on_both_sides(role):
    other = "ffn" if role == "attention" else "attention"
    with channel_pair() as (left, right):
        end = background(authenticate, left, role, b"s", deadline())
        # The other version may go on with whatever it likes.
        right.send(challenge(other, protocol=AFD_PROTOCOL_VERSION + 1), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError, match="version 2.*this .* version 1"):
            end.result(TIMEOUT_S)
        # It has been told our version too.
        assert right.recv(AFDChallenge, timeout_s=TIMEOUT_S).protocol == 1


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_both_have_the_same_role(role):
    with channel_pair() as (left, right):
        end = background(authenticate, left, role, None, deadline())
        right.send(challenge(role, has_secret=False), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError, match=f"afd_role '{role}', and so has"):
            end.result(TIMEOUT_S)


@repeat(30)
def test_ffn_tells_nothing_to_who_cannot_prove_the_secret():
    with channel_pair() as (left, right):
        end = background(authenticate, left, "ffn", b"s", deadline())
        right.send(challenge("attention"), TIMEOUT_S)
        right.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        right.send(AFDProof(mac=secrets.token_bytes(32)), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError):
            end.result(TIMEOUT_S)
        left.end_sending()
        # Not even its own proof, which could be tried against guesses.
        assert right.recv(AFDRefused, timeout_s=TIMEOUT_S)
        with pytest.raises(EOFError):
            right.recv(AFDRefused, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("after_challenge", [False, True])
@repeat(30)
def test_ffn_takes_no_refusal_from_who_has_not_proved_the_secret(after_challenge):
    with channel_pair() as (left, right):
        end = background(authenticate, left, "ffn", b"s", deadline())
        if after_challenge:
            right.send(challenge("attention"), TIMEOUT_S)
            right.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        right.send(AFDRefused(reason="text for the log"), TIMEOUT_S)
        with pytest.raises(AFDProtocolError) as error:
            end.result(TIMEOUT_S)
        assert "text for the log" not in str(error.value)


def test_ffn_says_nothing_to_who_only_connects():
    with channel_pair() as (left, right):
        with pytest.raises(TimeoutError):
            authenticate(left, "ffn", b"s", time.monotonic() + 0.05)
        left.end_sending()
        with pytest.raises(EOFError):
            right.recv(AFDChallenge, timeout_s=TIMEOUT_S)


@repeat(30)
def test_a_proof_sent_back_is_no_proof():
    # A false FFN server lets attention prove first, and answers with that.
    with channel_pair() as (left, right):
        end = background(authenticate, left, "attention", b"s", deadline())
        theirs = right.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        right.send(challenge("ffn", nonce=theirs.nonce), TIMEOUT_S)
        right.send(right.recv(AFDProof, timeout_s=TIMEOUT_S), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError, match="VLLM_AFD_SECRET is not the one"):
            end.result(TIMEOUT_S)


@repeat(30)
def test_the_proof_of_one_role_is_none_of_the_other():
    # A false attention server gets the real one to answer FFN's nonce as FFN's
    # challenge, and the answer is for another pair of nonces in any case.
    with channel_pair() as (ffn, to_ffn), channel_pair() as (attention, to_attention):
        ffn_end = background(authenticate, ffn, "ffn", b"s", deadline())
        attention_end = background(
            authenticate, attention, "attention", b"s", deadline()
        )
        nonce = to_attention.recv(AFDChallenge, timeout_s=TIMEOUT_S).nonce
        to_ffn.send(challenge("attention"), TIMEOUT_S)
        ffn_nonce = to_ffn.recv(AFDChallenge, timeout_s=TIMEOUT_S).nonce
        assert nonce != ffn_nonce
        to_attention.send(challenge("ffn", nonce=ffn_nonce), TIMEOUT_S)
        to_ffn.send(to_attention.recv(AFDProof, timeout_s=TIMEOUT_S), TIMEOUT_S)
        with pytest.raises(AFDHandshakeError):
            ffn_end.result(TIMEOUT_S)
        to_attention.close()
        with pytest.raises((EOFError, OSError)):
            attention_end.result(TIMEOUT_S)


@repeat(30)
def test_a_recorded_proof_is_no_good_again():
    with channel_pair() as (a, b), channel_pair() as (c, d):
        # An attacker between them sees all of a good handshake.
        ends = [
            background(authenticate, a, "attention", b"s", deadline()),
            background(authenticate, d, "ffn", b"s", deadline()),
        ]
        recorded = []
        for source, sink, kind in (
            (b, c, AFDChallenge),
            (c, b, AFDChallenge),
            (b, c, AFDProof),
            (c, b, AFDProof),
        ):
            recorded.append(source.recv(kind, timeout_s=TIMEOUT_S))
            sink.send(recorded[-1], TIMEOUT_S)
        for end in ends:
            end.result(TIMEOUT_S)

    attention_challenge, ffn_challenge, attention_proof, ffn_proof = recorded
    with channel_pair() as (left, right):
        end = background(authenticate, left, "ffn", b"s", deadline())
        right.send(attention_challenge, TIMEOUT_S)
        right.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        right.send(attention_proof, TIMEOUT_S)
        with pytest.raises(AFDHandshakeError):
            end.result(TIMEOUT_S)
    with channel_pair() as (left, right):
        end = background(authenticate, left, "attention", b"s", deadline())
        right.send(ffn_challenge, TIMEOUT_S)
        right.recv(AFDChallenge, timeout_s=TIMEOUT_S)
        right.send(ffn_proof, TIMEOUT_S)
        with pytest.raises(AFDHandshakeError):
            end.result(TIMEOUT_S)


def test_the_secret_never_travels_and_nonces_never_repeat():
    seen = b""
    nonces = set()
    secret = b"a secret to look for"
    for _ in range(30):
        with channel_pair() as (a, b), channel_pair() as (c, d):
            ends = [
                background(authenticate, a, "attention", secret, deadline()),
                background(authenticate, d, "ffn", secret, deadline()),
            ]
            for source, sink, kind in (
                (b, c, AFDChallenge),
                (c, b, AFDChallenge),
                (b, c, AFDProof),
                (c, b, AFDProof),
            ):
                message = source.recv(kind, timeout_s=TIMEOUT_S)
                seen += encode(message)
                if kind is AFDChallenge:
                    nonces.add(message.nonce)
                sink.send(message, TIMEOUT_S)
            for end in ends:
                end.result(TIMEOUT_S)
    assert secret not in seen and secret.hex().encode() not in seen
    assert len(nonces) == 60


def test_proofs_are_compared_in_constant_time():
    with mock.patch.object(
        handshake.hmac, "compare_digest", wraps=hmac.compare_digest
    ) as compare:
        assert run_authenticate(b"s", b"s") == (None, None)
        assert compare.call_count == 2
        run_authenticate(b"s", b"t")
        assert compare.call_count == 3


@pytest.mark.parametrize("role", ["attention", "ffn"])
@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1",
        b"\x00" * 64,
        encode(step(1)),
        encode(hello("attention")),
        encode(AFDProof(mac=bytes(32))),
    ],
    ids=lambda v: repr(v[:8]),
)
@repeat(30)
def test_junk_instead_of_a_challenge(role, junk):
    with channel_pair() as (left, right):
        right._sock.send(junk)
        with pytest.raises(AFDProtocolError):
            authenticate(left, role, b"s", deadline())


def test_an_early_proof_is_out_of_order():
    with channel_pair() as (left, right):
        end = background(authenticate, left, "ffn", None, deadline())
        right.send(challenge("attention", has_secret=False), TIMEOUT_S)
        right.send(AFDProof(mac=bytes(32)), TIMEOUT_S)
        end.result(TIMEOUT_S)
        with pytest.raises(AFDProtocolError, match="no valid AFDHello"):
            expect(left, AFDHello, deadline())


def test_each_wait_ends_at_the_deadline():
    for role in ("attention", "ffn"):
        with channel_pair() as (left, _):
            start = time.monotonic()
            with pytest.raises(TimeoutError):
                authenticate(left, role, b"s", start + 0.05)
            assert time.monotonic() - start < 10


def test_refusal_is_cleaned_and_best_effort():
    with channel_pair() as (left, right):
        send_refusal(left, "no\x1b[2J\nfaked line" + "x" * 5000)
        with pytest.raises(AFDHandshakeError, match="it refused: no") as error:
            expect(right, AFDHello, deadline())
        assert str(error.value).isprintable()
        left.close()
        send_refusal(left, "nobody hears this")


def test_empty_secret_is_an_error(monkeypatch):
    monkeypatch.delenv("VLLM_AFD_SECRET", raising=False)
    assert get_secret() is None
    monkeypatch.setenv("VLLM_AFD_SECRET", "ümlaut")
    assert get_secret() == "ümlaut".encode()
    monkeypatch.setenv("VLLM_AFD_SECRET", "")
    with pytest.raises(ValueError, match="VLLM_AFD_SECRET is set but empty"):
        get_secret()
