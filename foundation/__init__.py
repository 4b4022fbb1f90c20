"""The foundation of all stages: data, models, number formats, training, measurement, artifacts, processes. Imports no package above it."""

import os

# torch asks for huge pages for tensors of 2 MiB and more. Every training step allocates the gradient of the embedding table anew, and
# faulting it in by pages of 4 KiB is a tenth of the step of a small encoder. Read by torch at its first allocation; a user's value wins.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
