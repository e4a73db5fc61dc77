"""What vLLM makes of `vllm serve` lines, without serving; run with its interpreter.

Reads a list of argument lists from standard input, and prints for each, as the last
line, what the servers would be configured with, or the error that they end with.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def config_of(arguments: list[str]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *arguments])
    command.validate(args)
    args.model = args.model_tag
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    afd = config.afd_config
    return {
        "role": afd.afd_role,
        "afd_host": afd.afd_host,
        "connect_timeout_s": afd.connect_timeout_s,
        "http_port": args.port,
        "dbo": config.parallel_config.use_ubatching,
        # What both roles have to have alike.
        "common": {
            "model": config.model_config.model,
            "served_model_name": config.model_config.served_model_name,
            "dtype": str(config.model_config.dtype),
            "max_model_len": config.model_config.max_model_len,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "afd_port": afd.afd_port,
            "afd_connector": afd.afd_connector,
            "gate_placement": afd.gate_placement,
            "ranks": (afd.num_attention_ranks, afd.num_ffn_ranks),
        },
    }


def main() -> None:
    found = []
    for arguments in json.load(sys.stdin):
        try:
            found.append(config_of(arguments))
        except (Exception, SystemExit) as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
