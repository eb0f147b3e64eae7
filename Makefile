# Everything here works from a fresh checkout with only make and Python 3.11 or newer.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
SEEDS ?= 0 1 2

VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
RETIRED := .venv-retired
ARM64 := .venv-arm64
AVX512 := .venv-avx512
FLOWER := .venv-flower
LOGS := .venv-logs
PEERS := .venv-peers
PYTHONS ?= 3.11 3.12 3.13 3.14
STAMP := $(VENV)/.installed
PACKAGES := profiles device_agent exporters toolkit edgetailor

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-oldest test-zoo test-web web check types-of-packages types-of-tests format docs release-check test-arm64 test-board test-avx512 test-flower test-logs test-pythons coverage
.PHONY: bench-families bench-step bench-retired bench-arm64 bench-memory bench-export bench-agent bench-coordinator bench-fleet bench-page bench-plan bench-simulation bench-papers bench-fashion bench-engines bench-deploy bench-zoo bench-attacks bench-secagg bench-privacy bench-peers

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install the project into it (the others do this first)

demo: setup ## run the demo; options in ARGS, e.g. make demo ARGS=--help
	$(BIN)/edgetailor demo $(ARGS)

# One thread a worker: two workers that each start as many threads as cores only wait for each other.
test: setup ## run the tests; options in ARGS, e.g. make test ARGS="-k cp"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Stock models come from libraries of an extra.
ZOO := $(VENV)/.zoo
$(ZOO): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[zoo]'
	@touch $@

# Workers of simulations, for their tests and times.
RAY := $(VENV)/.ray
$(RAY): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev,ray]'
	@touch $@

test-long: $(ZOO) $(RAY) ## run the tests that take minutes
	@command -v qemu-x86_64 >/dev/null || apt-get install --yes --quiet qemu-user
	@command -v promtool >/dev/null || apt-get install --yes --quiet prometheus
	$(BIN)/python -m pytest -m long -W default $(ARGS)

# onnxruntime 1.19.2 has wheels up to Python 3.12, and numpy 1 only. Termux has 1.23.2.
test-oldest: setup ## run exported graphs on the oldest onnxruntime, and on that of Termux (minutes)
	$(PYTHON) -m venv $(OLDEST)
	PYTHONPATH=.:tests $(BIN)/python tests/oldest_runtime.py write $(OLDEST)/graphs
	for versions in 'onnxruntime==1.19.2 numpy<2' 'onnxruntime==1.23.2 numpy>=2'; do \
	  $(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check $$versions && \
	  $(OLDEST)/bin/python tests/oldest_runtime.py check $(OLDEST)/graphs || exit 1; done

# flwr wants older versions of fastapi, rich and others than the constraints name. Where libraries of
# extras are imported, their own warnings are no errors (-W default).
test-flower: ## three sites of five agents under Flower, in an environment of its own (minutes)
	$(PYTHON) -m venv $(FLOWER)
	grep '^torch==' constraints.txt > $(FLOWER)/torch.txt
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c $(FLOWER)/torch.txt -e '.[flower]' pytest hypothesis
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest -m flower -W default -p no:cacheprovider tests/flower $(ARGS)

test-logs: ## logs of simulations and of serve in MLflow and TensorBoard, in an environment of its own
	$(PYTHON) -m venv $(LOGS)
	grep '^torch==' constraints.txt > $(LOGS)/torch.txt
	$(LOGS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c $(LOGS)/torch.txt -e '.[mlflow,tensorboard]' pytest hypothesis
	OMP_NUM_THREADS=1 $(LOGS)/bin/python -m pytest -m logs -W default -p no:cacheprovider \
	  tests/toolkit/simulation tests/toolkit/coordinator/test_round_logs.py $(ARGS)

# Each in an environment of its own. Shims of pyenv are there without their version, too.
test-pythons: ## run the tests on each Python of PYTHONS="3.11 3.12 3.13 3.14" that is installed; ARGS
	@failed=; for version in $(PYTHONS); do \
	  python=; for candidate in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python$$version; do \
	    $$candidate -c '' 2>/dev/null && python=$$candidate && break; done; \
	  test -n "$$python" || { echo "Python $$version is not installed: skipped"; continue; }; \
	  echo "Python $$version: $$($$python --version)"; \
	  $$python -m venv .venv-pythons/$$version && \
	  .venv-pythons/$$version/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt -e '.[dev]' && \
	  OMP_NUM_THREADS=1 .venv-pythons/$$version/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) || \
	  failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed on Python$$failed" >&2; exit 1; }

COVERAGE := .cache/coverage
coverage: setup ## run the tests and print the coverage of lines and branches by module; ARGS
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	COVERAGE_FILE=$(CURDIR)/$(COVERAGE)/data OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  -n $(WORKERS) --dist worksteal --cov --cov-report=term $(ARGS)

# The agent's tests that need no bundles and no other part of the project.
TORCH_FREE := tests/profiles $(addprefix tests/device_agent/, client system test_log_format.py \
  data/test_preparation.py federation/test_device_state.py formats/test_tensor_files.py \
  training/test_memory_estimate.py)

test-arm64: setup ## train and test the agent on emulated ARM boards (minutes; Debian 12 or newer)
	@command -v qemu-aarch64 >/dev/null || apt-get install --yes --quiet qemu-user
	sh tests/emulated/make_boards.sh $(ARM64) $(BIN)/python
	rm -rf $(ARM64)/bundles && mkdir $(ARM64)/bundles
	PYTHONPATH=.:tests $(BIN)/python tests/emulated/board_check.py write $(ARM64)/bundles
	for board in cortex-a72 cortex-a53; do \
	  PYTHONPATH=.:tests $(ARM64)/$$board tests/emulated/board_check.py check $(ARM64)/bundles || exit 1; done
	PYTHONPATH=.:tests $(ARM64)/cortex-a72 -m pytest -p no:cacheprovider --noconftest -p conftest -p scripted_http \
	  $(TORCH_FREE)

# A board's packages are only unpacked here; nothing of them is installed.
BOARD := .board
$(BOARD)/disk.raw: tests/board/make_image.sh tests/emulated/get_wheels.sh pyproject.toml constraints.txt | $(STAMP)
	@command -v qemu-system-aarch64 mmdebstrap qemu-img cpio depmod debugfs ssh >/dev/null || \
	  apt-get install --yes --quiet --no-install-recommends qemu-system-arm qemu-utils mmdebstrap cpio kmod \
	  e2fsprogs openssh-client
	sh tests/board/make_image.sh $(BOARD) $(BIN)/python

test-board: setup $(BOARD)/disk.raw ## the tutorial and power cuts on a whole emulated board (Debian 12 or newer, root); ARGS
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m board -W default -p no:cacheprovider tests/board $(ARGS)
	@cat $(BOARD)/cases.md

test-avx512: setup ## train on an emulated processor with AVX-512 (10 minutes; Debian 12, x86-64)
	@command -v bochs-bin >/dev/null || apt-get install --yes --quiet --no-install-recommends \
	  bochs bochs-term bochsbios vgabios xorriso isolinux syslinux-common busybox-static cpio
	rm -rf $(AVX512)/bundles && mkdir -p $(AVX512)/bundles
	PYTHONPATH=.:tests $(BIN)/python tests/emulated/board_check.py write $(AVX512)/bundles
	sh tests/emulated/avx512.sh $(AVX512) $(BIN)/python

# One thread, as for tests: on shared cores two threads wait for each other, an SVD's most of all.
bench-deploy: setup ## size, accuracy and time of deployed models by precision (minutes)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_deploy.py

bench-families: setup ## time the server's factorizations and aggregation (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_families.py
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_aggregation.py

bench-step: setup ## time training steps against PyTorch (minutes); options in ARGS
	$(BIN)/python tests/benchmarks/bench_step.py $(ARGS)

# Its wheels end with Python 3.11, and its tools with onnx 1.16 and numpy 1.
bench-retired: setup ## the same beside onnxruntime-training 1.19.2, its last (minutes, 1 GB)
	$(PYTHON) -m venv $(RETIRED)
	$(RETIRED)/bin/python -m pip install --quiet --disable-pip-version-check \
	  onnxruntime-training==1.19.2 'onnx==1.16.*' 'numpy<2'
	$(BIN)/python tests/benchmarks/bench_step.py --retired $(RETIRED)/bin/python $(ARGS)

# 2.8 is the last torch whose wheel for aarch64 works without CUDA's libraries. The wheels are named one
# by one, because pip would choose requirements for this machine.
EAGER := torch==2.8.0 filelock fsspec jinja2 markupsafe mpmath networkx sympy typing-extensions
bench-arm64: setup ## training steps on an emulated ARM board against PyTorch 2.8 (40 minutes, 600 MB); ARGS
	@command -v qemu-aarch64 >/dev/null || apt-get install --yes --quiet qemu-user
	sh tests/emulated/make_boards.sh $(ARM64) $(BIN)/python
	sh tests/emulated/get_wheels.sh arm64 $(BIN)/python $(ARM64)/torch --no-deps $(EAGER)
	PYTHONPATH=. $(BIN)/python tests/benchmarks/bench_arm64.py $(ARM64)/cortex-a72 $(ARGS)

bench-memory: setup ## peak memory of training steps, predicted, measured and PyTorch's (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_memory.py $(ARGS)

bench-export: setup ## time and memory of exports, by stage (minutes); options in ARGS
	$(BIN)/python tests/benchmarks/bench_export.py $(ARGS)

bench-agent: ## size, import time and memory of the base install, in a fresh environment
	$(PYTHON) tests/benchmarks/bench_agent.py

bench-page: setup web ## training in a page beside a native agent, in Chromium (minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,web]'
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_page.py

bench-coordinator: setup web ## what requests cost with up to 2,000 devices, and 10,000 that wait (minutes)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_coordinator.py $(ARGS)

bench-fleet: setup ## 300 devices that come and go, with three kinds of rounds and two restarts (20 minutes)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_fleet.py $(ARGS)

bench-simulation: setup ## simulated rounds beside plain PyTorch loops, by family (minutes)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_simulation.py $(ARGS)

bench-attacks: setup ## attacks against defences in simulation; ARGS=--quick for minutes, all else takes days
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_attacks.py $(ARGS)

bench-privacy: setup ## accuracy by epsilon on the digits, three seeds, with a plot (under half an hour); ARGS
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_privacy.py $(ARGS)

bench-secagg: setup ## bytes and seconds of a secure sum, in memory; ARGS="10 100 300" for other groups
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_secagg.py $(ARGS)

bench-engines: $(RAY) ## rounds of simulate in one process, in two and in Ray; Flower's engine (minutes)
	for what in times memory; do \
	  PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_engines.py $$what || exit 1; done
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check 'flwr[simulation]==1.41.*'
	$(FLOWER)/bin/python tests/benchmarks/bench_engines.py flower 2>/dev/null

# Clients in environments of their own, as their users install them. The last is tried only alone.
PEER_PIP := -m pip install --quiet --disable-pip-version-check
bench-peers: setup ## the same federation by EdgeTailor, Flower and NVFLARE (an hour, 4 GB); ARGS="--runs 1"
	@test -d /usr/share/datasets/fashion-mnist || apt-get install --yes --quiet dataset-fashion-mnist
	for peer in edgetailor flower nvflare retired; do $(PYTHON) -m venv $(PEERS)/$$peer || exit 1; done
	grep '^torch==' constraints.txt > $(PEERS)/torch.txt
	$(PEERS)/edgetailor/bin/python $(PEER_PIP) -c constraints.txt .
	$(PEERS)/flower/bin/python $(PEER_PIP) -c $(PEERS)/torch.txt flwr==1.42.0 torch
	$(PEERS)/nvflare/bin/python $(PEER_PIP) -c $(PEERS)/torch.txt nvflare==2.9.0 torch
	-$(PEERS)/retired/bin/python $(PEER_PIP) flwr==1.42.0 onnxruntime-training==1.19.2 'onnx==1.16.*' 'numpy<2'
	for what in alone 'run --model digits_cnn' 'run --model resnet20' 'run --model mobilenet' faults; do \
	  PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_peers.py $$what $(ARGS) || exit 1; done

# A run that was interrupted continues; finished ones are kept.
bench-papers: setup ## the papers' methods on digits, into .papers (under an hour); SEEDS="0 1 2"
	for seed in $(SEEDS); do for file in docs/papers/digits/*.toml; do \
	  echo $$file --seed $$seed --out .papers/$$(basename $$file .toml)-$$seed; done; done \
	  | OMP_NUM_THREADS=1 xargs -L1 -P$(WORKERS) $(BIN)/edgetailor simulate
	for paper in embracingfl fedhm inclusivefl tdpfed; do \
	  $(BIN)/edgetailor compare .papers/$$paper-*/ --curves .papers/$$paper.png; done

# Debian's package has the 70,000 pictures. A run that was interrupted continues.
FASHION := dnn cnn resnet
bench-fashion: setup ## federated methods on Fashion-MNIST, 100 clients, into .fashion (hours); SEEDS="0", FASHION="cnn"
	@test -d /usr/share/datasets/fashion-mnist || apt-get install --yes --quiet dataset-fashion-mnist
	for seed in $(SEEDS); do for model in $(FASHION); do for file in docs/papers/fashion/$$model-*.toml; do \
	  echo $$file --seed $$seed --out .fashion/$$(basename $$file .toml)-$$seed; done; done; done \
	  | OMP_NUM_THREADS=1 xargs -L1 -P$(WORKERS) $(BIN)/edgetailor simulate
	for model in $(FASHION); do \
	  $(BIN)/edgetailor compare .fashion/$$model-*/ --target 0.8 --curves .fashion/$$model.png; done

bench-plan: setup ## what the planner predicts against what is measured (many minutes); ARGS
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_plan.py $(ARGS)

bench-zoo: $(ZOO) ## training steps of ten stock models at 224 x 224, with PyTorch's beside (minutes)
	PYTHONPATH=. $(BIN)/python tests/zoo/bench_zoo.py $(ARGS)

check: setup ## lint, formatting, strict types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 types-of-packages types-of-tests
	$(BIN)/lint-imports --no-logo

types-of-packages:
	$(BIN)/mypy --strict $(PACKAGES:%=-p %)

types-of-tests:
	$(BIN)/mypy --strict --no-warn-return-any --untyped-calls-exclude=torch \
	  --untyped-calls-exclude=nbformat --follow-imports=silent --cache-dir=.mypy_cache/tests tests/*.py examples/*.py

# The documentation's tools are an extra of their own: nothing else needs them.
DOCS := $(VENV)/.docs
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev,docs]'
	@touch $@

docs: $(DOCS) ## build the documentation site into site/, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open site/index.html"

# Node is needed by those who change the page only; a released wheel has the built page.
WEB := toolkit/web
web: ## build the pages for phones and the operator into toolkit/web/built/ (needs node 20)
	@found=$$(node --version 2>/dev/null); major=$${found#v}; major=$${major%%.*}; \
	command -v npm >/dev/null && test "$${major:-0}" -ge 20 || { \
	  echo "make web needs Node.js 20 or newer with npm; node is $${found:-not installed}." \
	  "Debian 12 and Ubuntu 24.04 have 18: see https://nodejs.org/en/download" >&2; exit 1; }
	cd $(WEB) && npm ci --no-audit --no-fund && npm run check && npm run build

CHROMIUM ?= $(shell command -v chromium)
test-web: setup web ## train in a real browser, beside native agents (minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,web]'
	@test -n "$(CHROMIUM)" || apt-get install --yes --quiet chromium
	@command -v firefox-esr >/dev/null || apt-get install --yes --quiet firefox-esr
	@command -v caddy >/dev/null || apt-get install --yes --quiet caddy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m web tests/toolkit/web $(ARGS)

test-zoo: $(ZOO) ## export stock models of five libraries, into docs/reference/models.md (hours); ARGS
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/zoo/run_zoo.py $(ARGS)

RELEASE := $(VENV)/.release
$(RELEASE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev,release]'
	@touch $@

# -P, because tests/ has folders with the names of packages.
release-check: $(RELEASE) web ## build sdist and wheel, and try each extra in a fresh environment (minutes)
	$(BIN)/python -P tests/release_check.py $(ARGS)

format: setup ## format the code and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The stamp goes first and comes back last, so an install that stops half-way is done again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@command -v $(PYTHON) >/dev/null || { \
	  echo "setup needs Python 3.11 or newer; there is no '$(PYTHON)' here." \
	       "Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name a newer one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "setup needs Python's venv and ensurepip modules; $(PYTHON) lacks them." \
	       "Install them, on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib $(PACKAGES) || true # on all cores, which pip does not use
	@touch $@
	@echo "The commands are in $(BIN); to use them by their names: . $(BIN)/activate"
