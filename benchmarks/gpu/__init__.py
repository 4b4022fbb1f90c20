"""Measures the GPUs of a machine: our kernels on their own, and images, server and plans as `make gpu-check` judges them.

cases                           the launches that are checked, timed and compiled
timing, peaks                   times by the events of a GPU, and the peaks of data sheets
ahead_of_time                   registers, memory and instructions of a compiled kernel, without a GPU
measurements, gelu, squad, against_torch    what is measured
rivals, decoder_rivals          BERT-large and GPT-2 against torch, eager and compiled
figures                         runs these and writes one file
containers, clocks              Docker, and the clocks of the GPUs meanwhile
verdict, verdicts, kernel_verdicts, report  limits, judgements and their table
check                           `make gpu-check`
"""
