"""The load generator: requests to a running Triton server at a given rate or concurrency, and how long their answers take.

Existing generators do not serve: AIPerf speaks HTTP to language models alone, k6 and Locust have no Poisson arrivals, and PyPI holds only a
placeholder of perf_analyzer. So this one stands on the asyncio clients of tritonclient.
"""
