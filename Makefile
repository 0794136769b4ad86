# make demo   the environment, then a question to the bundled checkpoint
# make test   the environment, ruff, the test suite (what CI runs): 12 minutes on 2 cores, 20 on busy ones
# make lint   ruff alone
# make gpu-test   the kernels, the emulator's instructions and the bundled model on this machine's GPU
#
# Without a GPU torch's CPU build comes from PyTorch's own index, with one from PyPI. Another index or version:
#     make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130 TORCH=torch==2.13.0
# An empty TORCH_INDEX means PyPI, whose Linux build of torch brings gigabytes of CUDA packages.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

PIP = .venv/bin/python -m pip --disable-pip-version-check -q

.PHONY: demo test lint gpu-test clean

demo: .venv/runs
	.venv/bin/python single_shot_inference.py "What is the capital of France?"

test: lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

gpu-test: .venv/tests
	@.venv/bin/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('gpu-test: expected a GPU that torch sees, found none: make test needs none')"
	DSV4_TEST_GPU=1 .venv/bin/python -m pytest tests/kernels tests/emulator tests/test_on_gpu.py

lint: .venv/tests
	.venv/bin/ruff check .

.venv/runs: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, found " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) install --no-deps --retries 1 $(TORCH_INDEX:%=--index-url %) "$(TORCH)"
	$(PIP) install -e .
	@touch $@

.venv/tests: .venv/runs
	$(PIP) install -e ".[test]"
	@touch $@

clean:
	rm -rf .venv build *.egg-info
