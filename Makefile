# Everything from a fresh clone: `make example`, `make test`. Needs Python 3.9 to 3.13 and make, no root.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DIGITS := build/digits

.PHONY: help example test test-matrix lint docs clean

help:
	@echo "make example   train ResNet-50 on real images with two workers (sets up $(VENV) first)"
	@echo "make test      run the whole test suite (sets up $(VENV) first)"
	@echo "make test-matrix  the suite on the default, the oldest and the newest TensorFlow (each in its own .venv-…)"
	@echo "make lint      style and types"
	@echo "make docs      write the generated pages of docs/ anew"
	@echo "make clean     remove $(VENV), .venv-oldest, .venv-newest and build/"

example: $(STAMP)
	$(BIN)/python examples/resnet_ctl/make_digits_imagenet.py --data_dir $(DIGITS)
	$(BIN)/npurun -n 2 examples/resnet_ctl/resnet_ctl.py --data_dir $(DIGITS)

test: $(STAMP)
	$(BIN)/python -m pytest

# The oldest TensorFlow that the package works with (Python 3.9 to 3.11), and the newest that the registry has. The
# model garden's example is skipped there: the garden wants a TensorFlow of its own.
test-matrix: test .venv-oldest/.installed .venv-newest/.installed
	.venv-oldest/bin/python -m pytest
	.venv-newest/bin/python -m pytest

.venv-oldest/.installed: TENSORFLOW := "tensorflow==2.15.*" "tf-keras==2.15.*"
.venv-newest/.installed: TENSORFLOW := --upgrade tensorflow tf-keras
.venv-oldest/.installed .venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,benchmarks]" $(TENSORFLOW)
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m npu_device.environment > docs/environment.md
	$(BIN)/python -m npu_device.options > docs/options.md

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build

# The stamp is written last, so that an interrupted set-up is begun anew.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 9) <= v <= (3, 13) else "TensorFlow has no packages for Python %d.%d; run make PYTHON=python3.11 (3.9 to 3.13)" % v)'
	@echo "Setting up $(VENV): TensorFlow and the model garden, about 3.3 GB, a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[examples,test,lint,benchmarks]"
	@touch $@
