"""Stemcache as SGLang's external cache: adapters.sglang.linker.StemcacheLinker."""
