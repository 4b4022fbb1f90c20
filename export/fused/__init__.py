"""A w8a8 encoder on the fused kernels of `export.kernels`: the engine `torch_kernels`.

parts      finds the parts of a checkpoint and proves them by computing; needs transformers
plan       what is computed, as tensors and numbers; the file that the engine and the server open
rows       rows without padding, one after another
forward    the plan, kernel after kernel
library_attention    torch's attention kernel, where it is faster
tuning     which tile of a GEMM is fastest on this GPU, remembered
graphs     CUDA graphs, one for each size that rows are filled up to
runner     opens a plan and answers batches, in the engine and in a server
served     what a server opens; copied there with what it imports, which is everything but `parts`
"""
