# make dashboard   set everything up and serve the dashboard on this machine
# make test        set everything up and run all tests
# make core        compile explorer/estimator/core/allocator.c anew (needs no compiler: pip's ziglang has one)
# make accuracy    set everything up, estimate every measured job and print how far off (no GPU; docs/accuracy.md)
#
# Variables: PYTHON (3.11 or newer; found by itself), VENV (.venv), PORT (8866), ARGS (more arguments for Voila, pytest or the table),
# VENV_FLAGS (--system-site-packages keeps a PyTorch that is already installed).

VENV ?= .venv
PORT ?= 8866
RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$(VENV)/bin/python" -m
export PYTHON VENV VENV_FLAGS

.PHONY: help dashboard test accuracy core lint
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7

dashboard:
	@sh tools/setup.sh probe
	@echo "Starting the dashboard; its address follows."
	@$(RUN) explorer dashboard --port=$(PORT) $(ARGS)

test:
	@sh tools/setup.sh probe,test
	@$(RUN) pytest $(ARGS)

accuracy:
	@sh tools/setup.sh probe
	@$(RUN) benchmarks.accuracy $(ARGS)

core:
	@sh tools/setup.sh core
	@PATH="$(VENV)/bin:$$PATH" sh tools/core.sh

lint:
	@sh tools/setup.sh probe,test
	@$(RUN) ruff check .
