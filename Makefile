.PHONY: install test slow lint format types check builtin-model

install:      ## install with everything the tests need
	pip install -e '.[test]'

test:         ## the default suite: offline, CPU, minutes
	pytest

slow:         ## the long versions (200 kill points and the like)
	pytest -m slow

lint:         ## style and common mistakes
	ruff check .

format:       ## rewrite the layout
	ruff format .

types:        ## static types
	pyright

check: lint types test  ## what a change must pass
	ruff format --check .

builtin-model:  ## train rlvr_cli/assets/tiny-math again, from nothing (about a minute)
	rm -rf build/tiny-math && mkdir -p build
	python -m rlvr_cli.models.tiny build/tiny-math
	rlvr sft --preset quickstart --model build/tiny-math --runs-dir build --run tiny-math-sft
	rm -rf rlvr_cli/assets/tiny-math && cp -r build/tiny-math-sft/model rlvr_cli/assets/tiny-math
