"""A w8a8 encoder on the fused kernels of `export.kernels`: the engine `torch_kernels`.

    parts      finds the parts of a checkpoint and proves them by computing; needs transformers
    plan       what is computed, as tensors and numbers; the file that the engine and the server open
    rows       rows without padding, one after another
    forward    the plan, kernel after kernel
    tuning     which tile of a GEMM is fastest on this GPU, remembered
    graphs     CUDA graphs, one for each size that rows are filled up to

`modules` lists what a server needs of it: everything but `parts`.
"""
