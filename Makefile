# `make quickstart` and `make test` set up everything they need in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help quickstart test docs docs-source lint format oldest constraints clean

help:
	@echo "make quickstart  train a small model twice (full precision, SageBwd) and compare the losses"
	@echo "make test        lint and test on the CPU"
	@echo "make docs        build the documentation as a site in site/, with an API reference"
	@echo "make format      let ruff tidy the code"
	@echo "make oldest      compile the kernels with the oldest Triton that is supported"
	@echo "make constraints renew constraints.txt from pyproject.toml (needs uv: pip install uv)"
	@echo "make clean       remove .venv and caches (never runs/ or tokens/)"

quickstart: $(VENV)/train.done
	$(BIN)/python train.py -m experiment=quickstart attention=fpa,sagebwd runs_dir=runs/quickstart
	$(BIN)/python -m scripts.compare runs/quickstart --out runs/quickstart/comparison.png
	@echo "How to read it: one seed and 800,000 tokens show that both train, not which ends lower. On a CPU SageBwd is a plain PyTorch emulation, so its speed says nothing."

test: $(VENV)/dev.done lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

docs: $(VENV)/docs.done docs-source
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open site/index.html, or for the search: $(BIN)/python -m http.server --directory site"

# The pages as they lie in the repository, and what they link to, so that one set of links serves everywhere.
docs-source:
	rm -rf .docs-source
	mkdir -p .docs-source/scripts/paper
	cp -r README.md CONTRIBUTING.md CHANGELOG.md LICENSE CITATION.cff docs results .docs-source
	cp scripts/paper/*.py .docs-source/scripts/paper

lint: $(VENV)/dev.done
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

format: $(VENV)/dev.done
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

$(VENV)/%.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "sagebwd needs Python 3.10 or newer, this is " + sys.version.split()[0] + ". Point to another one: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): up to 5 GB, most of it PyTorch with CUDA"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@

# `make test` compiles them with the pinned Triton. This one lies beside it and is found first.
oldest: $(VENV)/dev.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oldest triton==3.6.0
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m tests.sagebwd.kernels.triton.compile_ahead "90/*/*/*" "86/128/*/*"

# The two pins that everything else is resolved around.
constraints:
	printf 'torch==2.13.0\ntriton==3.7.1\n' > .pins.txt
	uv pip compile --universal --python-version 3.10 --no-header --no-annotate --quiet \
	  --all-extras pyproject.toml --constraint .pins.txt --output-file .constraints.txt
	{ echo '# Every version that `make` installs, for Python 3.10 to 3.13. Made by `make constraints`; do not edit.'; \
	  cat .constraints.txt; } > constraints.txt
	rm .pins.txt .constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .docs-source site *.egg-info
