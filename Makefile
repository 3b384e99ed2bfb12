# One command each, the same here and in CI. Everything runs in .venv, which `make setup` makes;
# PYTHON chooses the Python that it is made with.

PYTHON ?= python3
VENV := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo serve session bench reproduce reproduce-real harmless bench-core compat soak test lint clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 24

setup: ## make .venv: vLLM's CPU build, this package, the tools (1-2 minutes, once)
	@$(PYTHON) scripts/setup_venv

demo: setup ## an attacker against a victim, on vLLM without and with PrefixShield
	@$(VENV)/python -m demo

serve: setup ## the demo's server with PrefixShield, until Ctrl-C (PORT=8000)
	@$(VENV)/python -m demo.serve $(if $(PORT),--port $(PORT))

session: setup ## an operator's session on the demo's server, into results/session/ (3-5 minutes)
	@$(VENV)/python -m demo.session

TRACE = traces/agents_bs16.jsonl.gz
BLOCK_SIZE = 16
BLOCKS = 5%,10%,25%
POLICIES = all
bench: setup ## compare policies on a trace (TRACE=path BLOCK_SIZE=16 BLOCKS=5%,10%,25% POLICIES=all)
	@$(VENV)/prefixshield compare "$(TRACE)" --block-size "$(BLOCK_SIZE)" --blocks "$(BLOCKS)" --policies "$(POLICIES)"

reproduce: setup ## the paper's tables and figures in virtual time, into results/ (about 7 minutes)
	@$(VENV)/prefixshield experiment all
	@$(VENV)/prefixshield report

RUNS = 10
reproduce-real: setup ## the same on the real server, where that can be run (hours; RUNS=10)
	@$(VENV)/prefixshield experiment all --engine real --runs $(RUNS)
	@$(VENV)/prefixshield experiment all --engine calibrated --runs $(RUNS)
	@$(VENV)/prefixshield report

harmless: setup ## does the default preset harm ordinary traffic: serial replays, into results/harmless/
	@$(VENV)/prefixshield harmless

bench-core: setup ## what the policies cost inside vLLM, next to its own pool, into results/bench-core/
	@$(VENV)/prefixshield bench-core

compat: setup ## the tests on other vLLM releases, into results/compat/ (VLLM="0.31.0 0.33.0")
	@$(VENV)/python scripts/compat $(VLLM)

STEPS = 1000000
GROUPS = 64
CHECK_EVERY = 100
soak: setup ## a million scheduler steps per policy in virtual time, looked at for leaks (STEPS=1000000 GROUPS=64)
	@$(VENV)/python -m prefixshield.evaluation.soak --steps $(STEPS) --groups $(GROUPS) --check-every $(CHECK_EVERY)

test: setup ## all tests
	@$(VENV)/python -m pytest

lint: setup ## style and types
	@$(VENV)/ruff check . scripts/setup_venv scripts/compat
	@$(VENV)/ruff format --check . scripts/setup_venv scripts/compat
	@$(VENV)/mypy
	@$(VENV)/mypy -p demo

clean: ## remove .venv and everything else that was generated
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -rf demo/model demo/logs demo/report.json demo/report.png
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
