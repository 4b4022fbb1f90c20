"""Measures the GPUs of a machine: our kernels on their own, and images, server and plans as `make gpu-check` judges them.

cases, w4a16                    the launches that are checked, timed and compiled; a GEMM with int4 weights that no engine runs
timing, peaks                   times by the events of a GPU, and the peaks of data sheets
ahead_of_time                   registers, memory and instructions of a compiled kernel, without a GPU
measurements, gelu, squad, against_torch    what is measured
figures                         runs these and writes one file
containers, clocks              Docker, and the clocks of the GPUs meanwhile
verdict, verdicts, kernel_verdicts, report  limits, judgements and their table
check                           `make gpu-check`
"""
