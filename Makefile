# Two commands do everything: `make demo` (install, train, show the result), `make test` (install, check, test).
# Before a release also: `make simulated-gpu` (the GPU tests on a simulated device), `make slow` (the tests that
# `make test` leaves out; `make test-all` runs both parts in one), `make docs` (the site, into build/site, and every page
# in Chromium if it is installed), `make wheel` (build it, install it, use it). `.ci/run` runs everything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SITE := $(VENV)/.installed-site
LOWEST ?= .venv-lowest
NEWEST ?= .venv-newest
# Bytecode is written even where the environment says otherwise: else each worker and each process that a test starts
# compiles all modules anew, and each worker rewrites the assertions of all tests.
export PYTHONDONTWRITEBYTECODE :=
# Modules are compiled at their first import, and the many that nothing imports never.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test test-all lint format unit slow quantized coverage planted fresh-context lowest newest gpu simulated-gpu fuzz matrix interrupts soak docs wheel clean

# PASSIVE: threads that wait do not spin; with another process on the two cores that is several times faster.
demo: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/graphckpt train --config-file configs/quickstart.py train.overwrite=True

test: lint unit

test-all: lint $(INSTALLED)
	$(PYTEST) -m ""

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests of a file run on one of the two workers, and so do all that start several processes: tests/helpers/workers.py.
# Of the installed plugins only this one: pytest rewrites every module of a plugin's package, all of hypothesis too.
XDIST := --disable-plugin-autoload -p xdist -n 2 --dist loadfile --no-loadscope-reorder -q
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(XDIST)

unit: $(INSTALLED)
	$(PYTEST)
	$(SIMULATED) $(FAST_SIMULATED)

# A CUDA device simulated on the CPU, built with g++ at first use: see CONTRIBUTING.md. Without g++ its tests do not run,
# unless GRAPHCKPT_REQUIRE_SIMULATED_CUDA=1 makes that an error.
SIMULATED := PYTHONPATH=tests $(PYTEST) -p simulated_cuda.plugin -m "gpu and not slow"
FAST_SIMULATED := $(addprefix tests/simulated_cuda/test_,streams.py capture.py planted.py) \
    $(addprefix tests/graph/test_,capture.py capture_transformers.py cuda_graph.py) tests/gpu/test_capture_edges.py \
    tests/stores/test_host.py tests/stores/test_host_blocks.py tests/train/test_prefetch.py
SCHEDULES ?= lazy eager random:0 random:1
# SEEN: files that `make unit` has run already, under the schedule `lazy`; .ci/run does not repeat them.
SEEN ?=
simulated-gpu: $(INSTALLED)
	$(SIMULATED) tests/simulated_cuda $(addprefix --ignore=,$(SEEN))
	for schedule in $(SCHEDULES); do $(SIMULATED) --schedule $$schedule --ignore=tests/simulated_cuda \
	    $$(if [ $$schedule = lazy ]; then echo $(addprefix --ignore=,$(SEEN)); fi) || exit 1; done

slow: $(INSTALLED)
	$(PYTEST) -m slow

# Optimizers and layers of bitsandbytes and torchao beside those that simulate them. Where the two are installed, PEFT
# imports them in every process: they are in a folder of their own, which these tests alone see.
QUANTIZED := build/quantized
quantized: $(QUANTIZED)/.installed
	PYTHONPATH=$(QUANTIZED) $(BIN)/python -W ignore -c "import bitsandbytes, torchao.optim"
	PYTHONPATH=$(QUANTIZED) $(PYTEST) -k "BesideTheLibraries or BesideBitsandbytes or of_the_library_on_a_cpu" \
	    $(addprefix tests/,simulation/test_kernel_optimizers.py simulation/test_quantized.py search/test_finetuning.py)

$(QUANTIZED)/.installed: $(INSTALLED)
	$(BIN)/python $(PIP_INSTALL) --no-deps --target $(QUANTIZED) bitsandbytes==0.50.0 torchao==0.18.0
	touch $(QUANTIZED)/.installed

# Branch coverage of the tests of `make test`, with those on the simulated device, into benchmarks/results/coverage.md.
coverage: $(INSTALLED)
	$(PYTEST) -p pytest_cov --cov --cov-report=
	$(SIMULATED) $(FAST_SIMULATED) -p pytest_cov --cov --cov-append --cov-report=json:build/coverage.json --cov-report=
	$(BIN)/python benchmarks/coverage.py build/coverage.json

# Faults in copies of the package, one by one, each with the tests that must find it (tests/planted_faults.toml): a run of
# pytest for each. PLANTED="partition" plants those with this word in their names. Into benchmarks/results/planted.md.
PLANTED ?=
planted: $(INSTALLED)
	$(BIN)/python tests/planted_faults.py $(PLANTED)

# Every backward in a fresh context, as CUDA's thread for it has one: what a CPU can show of that. The tests of one
# process of the packages that have code in a backward: context variables are in engine, blocks and graph alone.
fresh-context: $(INSTALLED)
	PYTHONPATH=tests $(PYTEST) -p helpers.fresh_context -m "not slow and not multi_process" $(FRESH)
FRESH ?= $(addprefix tests/,blocks fuzz graph rules stores $(addprefix planning/test_,step_clock.py live_plan.py)) \
    --ignore=tests/rules/test_architectures.py

# The lowest releases that pyproject.toml allows, in an environment of their own. torch is the one exception: PyPI has
# 2.11.0 for CUDA only, which takes gigabytes; where PyTorch's own index can be reached, LOWEST_TORCH=2.11.0 tests it.
LOWEST_TORCH ?= 2.13.0
# transformers 5.17.0 calls what torch 2.13 has deprecated since.
LOWEST_WARNINGS := -W 'ignore:`torch.jit.script`:DeprecationWarning'
lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/pytest $(XDIST) -m "not slow or multi_process" $(LOWEST_WARNINGS) $(LOWEST_TESTS)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(LOWEST)/bin/pytest $(XDIST) -p simulated_cuda.plugin -m "gpu and not slow" \
	    $(LOWEST_WARNINGS) tests/graph
LOWEST_TESTS ?= tests/graph tests/integrations tests/blocks/test_rival.py \
    tests/rules/test_backward.py tests/rules/test_architectures.py

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python $(PIP_INSTALL) -c constraints-lowest.txt torch==$(LOWEST_TORCH) \
	    pytest pytest-xdist hypothesis -e ".[train,transformers-trainer,lightning]"
	touch $(LOWEST)/.installed

# What pip installs today, without constraints, which takes gigabytes with PyTorch's CUDA build: by hand, before a release.
# PYTHON=python3.13 takes another Python. The tests of `make test`, then each command, which must print nothing to stderr
# but its progress, and the demo.
newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(PIP_INSTALL) -e ".[test]"
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E "^(torch|transformers|triton|lightning|peft|accelerate) "
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest $(XDIST)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest $(XDIST) -m slow tests/test_command.py
	$(MAKE) demo INSTALLED= BIN=$(NEWEST)/bin

# On a machine with a CUDA device, where torch, transformers, pytest and matplotlib are installed: see docs/gpu.md.
# `make gpu GPU='--part 1 --out gpu'` measures every goal; without words it names the commands of all parts.
GPU ?=
gpu:
	$(PYTHON) benchmarks/gpu.py $(GPU)

# Random programmes under random policies, beside the plain model: MINUTES of them, or `make fuzz FUZZ="--seeds 0:300"`.
# DEVICE=simulated runs them on the simulated CUDA device.
MINUTES ?= 30
DEVICE ?= cpu
FUZZ ?= --minutes $(MINUTES) --workers 2 --device $(DEVICE) $(CAPTURED)
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(FUZZ)

# What works: models of four libraries under all kinds of policies; timm, torchvision and diffusers if they are installed.
# An hour on a core; MATRIX="--resume" goes on where it has ended, "--modes eager" runs a part.
MATRIX ?=
matrix: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/matrix.py $(MATRIX)

# Steps and plans interrupted by a timer at random moments of a SEED, and the two steps after each; some minutes.
COUNT ?= 2000
SEED ?= 0
interrupts: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/interrupts.py --count $(COUNT) --seed $(SEED)

# Many steps under each policy, with errors, evaluation and changing shapes between: whether anything grows. The results are
# in benchmarks/results/soak.md; SOAK="--cases full disk" runs a part.
STEPS ?= 10000
SOAK ?=
soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --steps $(STEPS) $(SOAK)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/_build_hooks/check_site.py build/site

wheel: $(SITE)
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist > /dev/null
	OMP_NUM_THREADS=1 $(BIN)/python tests/release/installed_wheel.py build/dist

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[test]"
	touch $(INSTALLED)

# Their names alone: pip takes 20 seconds to see that what graphckpt itself needs is there.
$(SITE): $(INSTALLED)
	$(BIN)/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	    print(*extras['docs'], *extras['release'], sep='\n')" > $(SITE).txt
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -r $(SITE).txt
	touch $(SITE)

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) build dist output
