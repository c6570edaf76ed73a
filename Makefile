# Everything happens inside this clone: tools in .tools/ and .venv/, results in build/.
.DEFAULT_GOAL := help
.PHONY: help demo test test-cluster lint pytest sweep format lock docs plans bench clean
.DELETE_ON_ERROR:

PYTHON := .venv/bin/python
# The Python 3.12 environment that generated repositories use here: 2.7 GB, so the demo and all tests share it.
SHARED_VENV := $(CURDIR)/build/venv312
# Arguments for pytest, e.g. make test PYTEST_ARGS="-k names".
PYTEST_ARGS ?=

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: .venv/synced ## Render the default answers into build/demo and rehearse that training job on this machine
	@echo "demo: [1/3] Python 3.12 environment of the generated repository"
	@VENV=$(SHARED_VENV) ./template/setup.sh
	@echo "demo: [2/3] copier copy into build/demo, with the default answers"
	@$(PYTHON) -m copier copy --quiet --trust --defaults --overwrite --vcs-ref HEAD . build/demo
	@echo "demo: [3/3] make rehearse in build/demo"
	@$(MAKE) --no-print-directory -C build/demo rehearse VENV=$(SHARED_VENV)
	@echo "demo: build/demo is a repository to look at; README.md in it is the runbook of its run"

test: lint pytest ## Linters, type checker and all tests, rehearsals included (30 minutes; the first time also 2.7 GB)
	@echo "test: linters, type checker and tests passed"

lint: .venv/synced ## Linters and type checker only
	@$(PYTHON) tools/lint.py

pytest: .venv/synced ## Tests only
	@echo "test: Python 3.12 environment for the rehearsals"
	@VENV=$(SHARED_VENV) ./template/setup.sh
	@# A file at a time for each of two workers, so that never two rehearsals run at once.
	@$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-cluster: .venv/synced ## The manifests and the cloud commands against a real Kubernetes API server (needs Go; the first build takes 10 minutes)
	@VENV=$(SHARED_VENV) ./template/setup.sh
	@$(PYTHON) -m tests.control_plane
	@$(PYTHON) -m pytest -m cluster $(PYTEST_ARGS)

sweep: .venv/synced ## The long proofs: every model in small, every slice and capacity through gcloud
	@VENV=$(SHARED_VENV) ./template/setup.sh
	@$(PYTHON) -m pytest -m sweep $(PYTEST_ARGS)

format: .venv/synced ## Format the Python code and mend what the linter can
	@.venv/bin/ruff check --quiet --fix .
	@.venv/bin/ruff format .

lock: ## Renew uv.lock, tools/checkov.lock and template/requirements.lock (LOCK_ARGS=--upgrade for newer versions)
	@uv=$$(./template/setup.sh uv) && "$$uv" lock $(LOCK_ARGS)
	@uv=$$(./template/setup.sh uv) && "$$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-header tools/checkov.in --output-file tools/checkov.lock $(LOCK_ARGS)
	@./template/setup.sh lock $(LOCK_ARGS)

docs: .venv/synced ## Regenerate the reference tables from copier.yml and the data
	@$(PYTHON) tools/reference.py

plans: ## Compile what extensions/plans.csv lacks, with the TPU compiler; hours, may be ended at any time (PLANS_ARGS=--list)
	@VENV=$(SHARED_VENV) ./template/setup.sh
	@$(SHARED_VENV)/bin/python tools/plans.py $(PLANS_ARGS)

bench: .venv/synced ## Measure; each script prints ratios against a named peer
	@VENV=$(SHARED_VENV) ./template/setup.sh
	@set -e; for script in bench/rendering.py bench/updating.py bench/formula.py bench/steps.py bench/rehearsal.py bench/preflight.py; do echo "bench: $$script"; $(PYTHON) $$script; done

clean: ## Remove what make has built here (uv's own cache stays)
	rm -rf build .venv .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/synced: uv.lock pyproject.toml
	@uv=$$(./template/setup.sh uv) && "$$uv" sync --frozen --quiet
	@touch $@
