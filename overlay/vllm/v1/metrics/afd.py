# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the attention role of AFD exchanges with the FFN role."""

from dataclasses import dataclass, fields

import prometheus_client

from vllm.config import VllmConfig
from vllm.v1.metrics.utils import create_metric_per_engine

# A wait is between what the peer needs for a layer of a few tokens and a prefill of
# many layers.
_WAIT_BUCKETS = (
    0.0001,
    0.0003,
    0.001,
    0.003,
    0.01,
    0.03,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
)


@dataclass
class AFDStats:
    """What the attention role exchanged, in one step or in several.

    The worker makes one for each step; it reaches the frontend in ModelRunnerOutput,
    then in EngineCoreOutputs->SchedulerStats.
    """

    steps: int = 0
    split_steps: int = 0
    # Each is a MoE layer of a stage.
    exchanges: int = 0
    # Those of split steps: others cannot overlap.
    split_exchanges: int = 0
    # Those whose answer was there when the other microbatch handed back.
    overlapped: int = 0
    # Of hidden states and router logits.
    bytes_sent: int = 0
    bytes_received: int = 0
    # In which the model waited for an answer, and nothing else ran.
    wait_s: float = 0.0

    def add(self, other: "AFDStats") -> None:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)

    def __str__(self) -> str:
        overlap = ""
        if self.split_exchanges:
            share = 100 * self.overlapped / self.split_exchanges
            overlap = f" ({share:.1f}% of those in split steps overlapped)"
        return (
            f"{self.steps} steps, {self.split_steps} of them split, "
            f"{self.exchanges} exchanges{overlap}, "
            f"{self.bytes_sent / 2**20:.1f} MiB sent, "
            f"{self.bytes_received / 2**20:.1f} MiB received, "
            f"{self.wait_s:.2f} s of waiting"
        )


class AFDProm:
    """Record AFD metrics in Prometheus.

    The share of the exchanges of split steps that overlapped can be calculated
    using a PromQL query:

      rate(vllm:afd_exchanges_overlapped_total[$interval]) / ignoring(split)
      rate(vllm:afd_exchanges_total{split="true"}[$interval])

    and the share of the time in which the attention role waited for the FFN role:

      rate(vllm:afd_step_wait_seconds_sum[$interval])
    """

    _counter_cls = prometheus_client.Counter
    _histogram_cls = prometheus_client.Histogram

    def __init__(
        self,
        vllm_config: VllmConfig,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        afd_config = vllm_config.afd_config
        # The FFN role runs no steps of its own engine.
        self.enabled = afd_config is not None and afd_config.is_attention
        if not self.enabled:
            return

        def per_engine(metric, label: str | None = None):
            return create_metric_per_engine(
                metric,
                {
                    idx: values if label is None else values + [label]
                    for idx, values in per_engine_labelvalues.items()
                },
            )

        self.counter_steps = per_engine(
            self._counter_cls(
                name="vllm:afd_steps",
                documentation="Number of steps whose MoE layers ran on the FFN role.",
                labelnames=labelnames,
            )
        )
        self.counter_split_steps = per_engine(
            self._counter_cls(
                name="vllm:afd_split_steps",
                documentation="Number of AFD steps split into two stages.",
                labelnames=labelnames,
            )
        )
        counter_exchanges = self._counter_cls(
            name="vllm:afd_exchanges",
            documentation=(
                "Number of exchanges with the FFN role, one per MoE layer and stage, "
                "by whether the step was split into two stages."
            ),
            labelnames=labelnames + ["split"],
        )
        self.counter_exchanges = {
            split: per_engine(counter_exchanges, str(split).lower())
            for split in (False, True)
        }
        self.counter_overlapped = per_engine(
            self._counter_cls(
                name="vllm:afd_exchanges_overlapped",
                documentation=(
                    "Number of exchanges of split steps whose answer was there when "
                    "the other stage handed back."
                ),
                labelnames=labelnames,
            )
        )
        counter_bytes = self._counter_cls(
            name="vllm:afd_bytes",
            documentation=(
                "Bytes of hidden states and router logits exchanged with the FFN "
                "role, by direction."
            ),
            labelnames=labelnames + ["direction"],
        )
        self.counter_sent = per_engine(counter_bytes, "sent")
        self.counter_received = per_engine(counter_bytes, "received")
        self.histogram_wait = per_engine(
            self._histogram_cls(
                name="vllm:afd_step_wait_seconds",
                documentation=(
                    "Histogram of the time in which a step waited for the FFN role "
                    "and had nothing else to run, in seconds."
                ),
                buckets=list(_WAIT_BUCKETS),
                labelnames=labelnames,
            )
        )

    def observe(self, stats: AFDStats, engine_idx: int = 0) -> None:
        """Count one step."""
        if not self.enabled:
            return
        self.counter_steps[engine_idx].inc(stats.steps)
        self.counter_split_steps[engine_idx].inc(stats.split_steps)
        whole = stats.exchanges - stats.split_exchanges
        self.counter_exchanges[False][engine_idx].inc(whole)
        self.counter_exchanges[True][engine_idx].inc(stats.split_exchanges)
        self.counter_overlapped[engine_idx].inc(stats.overlapped)
        self.counter_sent[engine_idx].inc(stats.bytes_sent)
        self.counter_received[engine_idx].inc(stats.bytes_received)
        self.histogram_wait[engine_idx].observe(stats.wait_s)
