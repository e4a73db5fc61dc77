"""One in-process engine that runs a fixed load whenever it is told to.

`engine.py MODEL`: a line on stdin starts a run, a line of JSON on stdout ends it.
Either interpreter, of the patched or of the unpatched environment, runs it.
"""

from __future__ import annotations

import json
import os
import sys
import time

# vLLM logs to stdout, which is for the results here.
RESULTS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

REQUESTS, PROMPT, TOKENS = 16, 32, 32


def main(model: str) -> None:
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        disable_log_stats=True,
        seed=0,
    )
    prompts = [
        {"prompt_token_ids": [(request * 31 + at) % 256 for at in range(PROMPT)]}
        for request in range(REQUESTS)
    ]
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    print(json.dumps(versions), file=RESULTS)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        result = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        }
        print(json.dumps(result), file=RESULTS)


if __name__ == "__main__":
    main(sys.argv[1])
