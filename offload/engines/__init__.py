"""Adapters for inference engines, built on :mod:`offload.from_thread`.

Each is a package that is imported only by its name: ``offload.engines.vllm`` has the connectors of vLLM,
``offload.engines.lmcache`` the adapter of LMCache, ``offload.engines.sglang`` the storage backend of SGLang's HiCache.
"""
