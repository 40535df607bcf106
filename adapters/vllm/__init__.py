"""A KV connector for vLLM: `adapters.vllm.connector` is what vLLM loads, and the one module that imports vLLM."""
