# make toy, make test: each makes the environment (.venv) on first use and says what it does.
#
# TRAPS. SHELLFLAGS: without pipefail a failed command before a pipe counts as success. PATH: rules and stages start
# `python` and `snakemake`; exporting the path serves them without an activated environment. A SIGKILL of make or
# snakemake leaves Snakemake's lock behind: workflow/scripts/unlock.py removes it only when nobody is alive any more.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# GPU=1 selects the environment for NVIDIA GPUs (envs/gpu), for every target.
GPU :=
VENV := $(if $(GPU),.venv-gpu,.venv)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# More words for snakemake or pytest: make toy ARGS=-n
ARGS :=
PORT := 5000
PYTHON_FILES := quads tests workflow/scripts
TYPED := quads/config quads/rewards quads/paper quads/provenance.py quads/files.py quads/lifeline.py quads/paths.py quads/schema.py quads/compare.py quads/comparison quads/exporting/folders.py quads/exporting/manifest.py quads/markers.py

.PHONY: help env toy smoke test test-fast lint ui

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## create or update .venv (3 to 10 minutes the first time, nothing afterwards); GPU=1: .venv-gpu
	@VENV=$(VENV) $(if $(GPU),envs/gpu/install.sh,envs/install.sh)
	@envs/sandbox.sh

toy: env  ## the main job: four arms, 60 GRPO steps each, table and figures under results/toy/report
	@python workflow/scripts/unlock.py
	@snakemake toy $(ARGS)

smoke: env  ## the shortest real run: two arms, three steps
	@python workflow/scripts/unlock.py
	@snakemake smoke $(ARGS)

test: lint  ## lint, types, every test that needs no GPU, one real smoke run
	@envs/slurm.sh
	@tests/run.sh $(ARGS)

test-fast: lint  ## the tests without verl and vLLM
	@python -m pytest $(ARGS)

lint: env  ## ruff, snakefmt, mypy, import contracts, shell syntax
	@ruff check $(PYTHON_FILES)
	@ruff format --check $(PYTHON_FILES)
	@snakefmt --check Snakefile workflow
	@mypy $(TYPED)
	@lint-imports
	@bash -n envs/install.sh envs/sandbox.sh envs/slurm.sh tests/run.sh envs/gpu/install.sh workflow/scripts/gpu_offline.sh .ci/run

ui: env  ## MLflow's page on http://127.0.0.1:5000 (PORT=... for another)
	@python workflow/scripts/ui.py --port $(PORT)
