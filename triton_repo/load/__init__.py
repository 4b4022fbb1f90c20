"""The load generator: sends requests to a running Triton server at a fixed rate or concurrency, and measures their latency.

Existing generators do not fit: AIPerf speaks HTTP only to language models, k6 and Locust have no Poisson arrivals, and PyPI holds only a
placeholder of perf_analyzer. So this one uses the asyncio clients of tritonclient.
"""
