# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What dual batch overlap (DBO) does, step by step."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import prometheus_client

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine

logger = init_logger(__name__)

# Why a step ran as a single batch, in the order in which they are looked for:
# - too_small: it has fewer tokens than there are microbatches.
# - threshold: it has fewer tokens than `--dbo-decode-token-threshold` or
#   `--dbo-prefill-token-threshold` asks for.
# - prefix_veto: a request reads prefix blocks that the same step writes.
# - dp_vote: this rank would have split it, but another DP rank could not.
# - graph: padded to its CUDA graph, the last microbatch would hold only padding.
UnsplitReason: TypeAlias = Literal[
    "too_small", "threshold", "prefix_veto", "dp_vote", "graph"
]


@dataclass
class DBOStats:
    """How one step that ran the model used DBO.

    The worker fills it in; it reaches the frontend in ModelRunnerOutput, then in
    EngineCoreOutputs->SchedulerStats.
    """

    # None if the step was split into microbatches.
    unsplit_reason: UnsplitReason | None = None
    # How often a microbatch yielded. None if the step was not split or replayed a
    # CUDA graph, where no thread yields.
    num_yields: int | None = None


class DBOLogging:
    """Aggregate and log DBO metrics.

    LoggingStatLogger aggregates the steps of a time interval using observe() and
    then logs them using log() before resetting to zero.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_steps = 0
        self.unsplit: Counter[UnsplitReason] = Counter()
        # Split steps that did not replay a CUDA graph, and their yields.
        self.num_yielding_steps = 0
        self.num_yields = 0

    def observe(self, stats: DBOStats) -> None:
        self.num_steps += 1
        if stats.unsplit_reason is not None:
            self.unsplit[stats.unsplit_reason] += 1
            return
        if stats.num_yields is not None:
            self.num_yielding_steps += 1
            self.num_yields += stats.num_yields

    def log(
        self, log_fn: Callable[..., Any] = logger.info, log_prefix: str = ""
    ) -> None:
        if not self.num_steps:
            return
        log_parts = ["DBO: %d of %d steps split"]
        log_args: list[int | float | str] = [
            self.num_steps - self.unsplit.total(),
            self.num_steps,
        ]
        if self.unsplit:
            log_parts[0] += " (%s)"
            log_args.append(
                ", ".join(
                    f"{reason.replace('_', ' ')} {count}"
                    for reason, count in self.unsplit.most_common()
                )
            )
        if self.num_yielding_steps:
            log_parts.append("%.1f yields per split step")
            log_args.append(self.num_yields / self.num_yielding_steps)
        log_fn(log_prefix + ", ".join(log_parts), *log_args)
        self.reset()


class DBOProm:
    """Record DBO metrics in Prometheus."""

    _counter_cls = prometheus_client.Counter

    def __init__(
        self,
        vllm_config: VllmConfig,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        # Model Runner V1 does not report DBOStats.
        self.enabled = (
            vllm_config.parallel_config.use_ubatching
            and vllm_config.use_v2_model_runner
        )
        if not self.enabled:
            return

        self.counter_steps = create_metric_per_engine(
            self._counter_cls(
                name="vllm:dbo_steps",
                documentation="Number of steps that ran the model with DBO enabled.",
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self.counter_split_steps = create_metric_per_engine(
            self._counter_cls(
                name="vllm:dbo_split_steps",
                documentation="Number of steps split into microbatches.",
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        counter_unsplit_steps = self._counter_cls(
            name="vllm:dbo_unsplit_steps",
            documentation=(
                "Number of steps not split into microbatches, by reason: "
                "'too_small' = fewer tokens than microbatches; 'threshold' = fewer "
                "tokens than the DBO token threshold; 'prefix_veto' = a request "
                "reads prefix cache blocks written in the same step; 'dp_vote' = "
                "another DP rank could not split; 'graph' = CUDA graph padding "
                "would fill the last microbatch."
            ),
            labelnames=labelnames + ["reason"],
        )
        self.counter_unsplit_steps = {
            reason: create_metric_per_engine(
                counter_unsplit_steps,
                {idx: lv + [reason] for idx, lv in per_engine_labelvalues.items()},
            )
            for reason in get_args(UnsplitReason)
        }
        self.counter_yields = create_metric_per_engine(
            self._counter_cls(
                name="vllm:dbo_yields",
                documentation=(
                    "Number of times a microbatch yielded to another one. Replayed "
                    "CUDA graphs are not counted."
                ),
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )

    def observe(self, stats: DBOStats, engine_idx: int = 0) -> None:
        if not self.enabled:
            return
        self.counter_steps[engine_idx].inc()
        if stats.unsplit_reason is not None:
            self.counter_unsplit_steps[stats.unsplit_reason][engine_idx].inc()
            return
        self.counter_split_steps[engine_idx].inc()
        self.counter_yields[engine_idx].inc(stats.num_yields or 0)
