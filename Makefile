# Thin: every target is one line into tools/. `make help` lists the verbs.
PYTHON ?= python3
DEVICE ?= cpu
# exec: a signal to make reaches the server that `make serve` becomes.
TOOLS = $(PYTHON) tools/bootstrap.py && exec .venv/bin/python -m tools

.PHONY: help status fetch apply build doctor serve serve-afd demo timeline export check \
	test test-fast test-faults test-each port port-test soak bench bench-thresholds

help:
	@$(TOOLS) --help

status fetch doctor export check report:
	@$(TOOLS) $@ $(ARGS)

apply:
	@$(TOOLS) apply $(if $(FORCE),--force) $(ARGS)

build:
	@$(TOOLS) build --device $(DEVICE) $(ARGS)

serve:
	@$(TOOLS) serve $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port $(PORT)) -- $(ARGS)

serve-afd:
	@$(TOOLS) serve-afd $(if $(ROLE),--role "$(ROLE)") $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port $(PORT)) -- $(ARGS)

demo:
	@$(TOOLS) demo $(if $(MODEL),--model "$(MODEL)") -- $(ARGS)

timeline:
	@$(TOOLS) timeline $(FILES) $(ARGS)

.PHONY: pr report
pr:
	@$(TOOLS) pr $(if $(REPO),--repo "$(REPO)") $(if $(BASE),--base "$(BASE)") $(ARGS) -- "$(SLUG)"

test:
	@$(TOOLS) test $(ARGS)

test-fast:
	@$(TOOLS) test --fast $(ARGS)

# What was tried is remembered (patches/trials.json), and not tried again.
test-each:
	@$(TOOLS) each $(if $(SLUG),--slug "$(SLUG)") $(ARGS)

port port-test:
	@$(TOOLS) $@ "$(BASE)" $(ARGS)

# Kills and stops each process of both AFD roles: about a minute for each of 56 cases.
test-faults:
	@$(PYTHON) tools/bootstrap.py && .venv/bin/python -m tools build && \
		E2E_FAULTS=1 exec .venv/bin/python -m pytest tests/e2e/test_afd_faults.py $(ARGS)

# Both AFD roles on two hosts, which are network namespaces: needs root.
.PHONY: test-network
test-network:
	@$(PYTHON) tools/bootstrap.py && .venv/bin/python -m tools build && \
		E2E_NETWORK=1 exec .venv/bin/python -m pytest tests/e2e/test_afd_network.py $(ARGS)

# What needs a GPU, of the workshop and of vLLM. It builds for CUDA first.
.PHONY: test-gpu
test-gpu:
	@$(PYTHON) tools/bootstrap.py && .venv/bin/python -m tools build --device cuda && \
		exec .venv/bin/python -m tools test --stage gpu $(ARGS)

# Both AFD roles in every supported number of ranks: some minutes each.
.PHONY: test-topology
test-topology:
	@$(PYTHON) tools/bootstrap.py && .venv/bin/python -m tools build && \
		E2E_TOPOLOGY=1 exec .venv/bin/python -m pytest \
		tests/e2e/test_afd_topology.py tests/e2e/test_afd_topologies.py $(ARGS)

soak:
	@$(TOOLS) soak $(if $(N),--requests $(N)) $(ARGS)

bench:
	@$(TOOLS) bench $(ARGS)

bench-thresholds:
	@$(TOOLS) bench --only thresholds -- $(ARGS)
