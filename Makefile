# Two commands do everything on a fresh Debian 12 machine: `make demo` and `make test`.
PY := .venv/bin/python
NAME ?= cold_start

.PHONY: setup demo test test-native test-sanitizers test-python test-slow fuzz tidy bench check format lint types clean

setup:
	@scripts/setup.sh

demo: setup
	$(PY) -m bench.demo

test: setup lint types test-native test-sanitizers test-python

test-native:
	@scripts/native-tests.sh dev

test-sanitizers:
	@scripts/native-tests.sh asan
	@scripts/native-tests.sh tsan

test-python:
	$(PY) -m pytest -q -m "not slow"

test-slow: setup
	$(PY) -m pytest -q -m slow

fuzz:
	@scripts/fuzz.sh

tidy:
	@scripts/tidy.sh

bench: setup
	$(PY) -m bench.$(NAME)

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	@scripts/clang-format.sh --dry-run --Werror

format:
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	@scripts/clang-format.sh -i

types:
	.venv/bin/mypy

check: setup format test

clean:
	rm -rf build .venv
