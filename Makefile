# Seven verbs. VENV is the environment to build and use; nothing is installed outside of it but the server environment of Triton,
# which lives in the user's cache folder. WORKERS is how many processes run the tests: each takes 1 GB of memory, and starts engines.
# CUDA=1 installs TensorRT too, and checks that it and torch see a GPU. RELEASE is the release of NVIDIA's images that gpu-check uses.
VENV ?= .venv
PYTHON ?= python3
WORKERS ?= 2
BIN = $(VENV)/bin
COMMA = ,
INSTALLED = $(VENV)/.installed$(if $(CUDA),-cuda)
EXTRAS = dev,tensorrt-rtx$(if $(CUDA),$(COMMA)tensorrt)
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: install demo test test-fast lint docs bench gpu-check

install: $(INSTALLED)

# One line for each step; what goes wrong is still shown.
$(INSTALLED): pyproject.toml constraints.txt triton_repo/server-requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; give one with PYTHON=")'
	@echo "environment    $(VENV), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "packages       from the index, in the versions of constraints.txt; takes minutes the first time"
	@$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@$(BIN)/compress doctor --fix 2>&1 | grep -E '^(triton server|server environment)'
	@$(if $(CUDA),$(BIN)/python -c "$$CUDA_CHECK")
	@touch $@

# torch from PyPI is built for CUDA; an index with builds for CPUs would give another.
define CUDA_CHECK
import sys, tensorrt, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU: check nvidia-smi, and that pip takes torch from PyPI")
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(f"cuda           torch {torch.__version__}, TensorRT {tensorrt.__version__}: {', '.join(names)}")
endef
export CUDA_CHECK

demo: install
	@$(BIN)/compress run recipes/quickstart.yaml; status=$$?; [ $$status -eq 0 ] || [ $$status -eq 3 ]

test: install
	$(PYTEST)

test-fast: install
	$(PYTEST) -m 'not whole and not slow and not gpu'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is missing is said before anything is installed.
gpu-check:
	@for program in nvidia-smi docker; do command -v $$program > /dev/null || { \
	    echo "gpu-check: $$program is not there; it needs an NVIDIA GPU and Docker; see docs/how-to/check-gpus.md" >&2; exit 2; }; done
	@$(MAKE) --no-print-directory install CUDA=1
	@$(BIN)/python -m benchmarks.gpu.check $(if $(RELEASE),--release $(RELEASE))

bench: install
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/peers.py
