"""Run by the interpreter that SGLang is installed in: an engine with the linker answers prompts, one JSON line each.

    python -m tests.adapters.sglang_engine MODEL CACHE_ADDRESS REDIS_URL [PAGE_TOKENS]

A line of standard input is {"prompt": [ids], "salt": text} or {"flush": true}; a line of output that begins with
ANSWER is the answer. End of input ends the engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang
from sglang.srt.managers.io_struct import GenerateReqInput

NEW_TOKENS = 12


def engine(model: str, cache: str, redis: str, page_tokens: str = "16") -> Any:
    linker = {
        "linker": "StemcacheLinker",
        "linker_module_path": "adapters.sglang.linker",
        "linker_extra_config": {"cache": cache, "redis": redis, "lookup_wait_s": 10.0, "store_timeout_s": 5.0},
    }
    return sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        max_total_tokens=4096,
        max_running_requests=4,
        mem_fraction_static=0.3,
        page_size=int(page_tokens),
        skip_tokenizer_init=True,
        log_level="error",
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=linker,
    )


def answer(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("flush"):
        return {"flushed": bool(llm.flush_cache().success)}
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    # Engine.generate takes no salt, HTTP requests do.
    request = GenerateReqInput(input_ids=asked["prompt"], sampling_params=sampling, cache_salt=asked.get("salt"))
    said = llm.loop.run_until_complete(anext(llm.tokenizer_manager.generate_request(request, None)))
    meta = said["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {
        "tokens": said["output_ids"],
        "cached": meta["cached_tokens"],
        "host": details.get("host", 0),
        "ended": meta["finish_reason"]["type"],
    }


def main() -> None:
    llm = engine(*sys.argv[1:])
    print("ANSWER", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print("ANSWER", json.dumps(answer(llm, json.loads(line))), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
