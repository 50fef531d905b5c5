.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## a real vLLM on this machine's CPU, with and without the store
	@scripts/env engine && .venv/bin/stepwell demo

test: ## lint, types and all tests, those with a real vLLM included
	@scripts/env engine && scripts/test

check: ## lint, types and the tidy test only (seconds)
	@scripts/check

clean: ## remove everything that was built, .venv and .cache included
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find stepwell tests -type d -name __pycache__ -prune -exec rm -rf {} +
