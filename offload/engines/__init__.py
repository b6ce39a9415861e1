"""Faces of inference engines: each is a package that is imported only by its name, and stands on :mod:`offload.from_thread`.

``offload.engines.vllm`` has the connectors of vLLM, ``offload.engines.lmcache`` the adapter of LMCache,
``offload.engines.sglang`` the storage backend of SGLang's HiCache.
"""
