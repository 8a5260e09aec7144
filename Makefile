# make demo | make test | make lint: each sets up what it needs. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo demo-images grpo grpo-images agents same-weights test test-all sanitize chaos long-run mutants kernel-test verl-test skyrl-test slime-test compose-test systemd-test slurm-test kubernetes-test ray-test gateway-test lint format lock release clean

setup: $(STAMP)

LOCKS := $(patsubst %,requirements/%.lock,core build cpu dev)
$(STAMP): $(LOCKS) requirements/torch-cpu.lock requirements/install_torchvision.py pyproject.toml CMakeLists.txt $(wildcard native/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	requirements/system.sh $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --no-compile -r requirements/torch-cpu.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --require-hashes $(addprefix -r ,$(LOCKS))
	$(BIN)/python requirements/install_torchvision.py  # for models with images
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true  # else every engine's first start compiles vLLM
	touch $@

demo: setup  # plain vLLM beside it: make demo BESIDE=vllm
	$(BIN)/python examples/countdown/demo.py $(if $(BESIDE),--beside $(BESIDE))

demo-images: setup  # the same with prompts that have images
	$(BIN)/python examples/countdown_images/demo_images.py

grpo: setup  # an RL run, e.g. make grpo SEED=1; goes on where a killed one was
	OMP_WAIT_POLICY=passive $(BIN)/python examples/grpo/train.py --seed $(SEED)

grpo-images: setup  # an RL run on prompts with images, e.g. make grpo-images SEED=1
	OMP_WAIT_POLICY=passive $(BIN)/python examples/grpo/train.py --problems problems_images --seed $(SEED) --out runs/grpo-images/seed-$(SEED)

agents: setup  # an RL run with a tool, e.g. make agents SEED=1; goes on where a killed one was
	OMP_WAIT_POLICY=passive $(BIN)/python examples/agents/train_agents.py --seed $(SEED)

same-weights: setup  # a run under faults has the checkpoints of an undisturbed one, e.g. make same-weights PLANS=10 EXAMPLE=agents
	OMP_WAIT_POLICY=passive $(BIN)/python bench/correctness/same_weights.py --plans $(PLANS) --seed $(SEED) --example $(EXAMPLE)

test: setup  # every claim; a part of it, as pytest takes it: make test PYTEST_ARGS="tests/unit -q"
	$(BIN)/python $(if $(PYTEST_ARGS),-m pytest $(PYTEST_ARGS),tests/parts.py)

test-all: setup  # the same with more sizes and seeds; goes on where it was stopped: make test-all PART="matrix offsets" AGAIN=1
	$(BIN)/python tests/parts.py --all $(if $(AGAIN),,--resume) $(PART)

TREE := native/tree/group_tree.cpp native/tree/context_drafter.cpp native/tree/context_map.cpp
STEPS := tests/native/step_drafter_stress.cpp native/drafts/step_drafter.cpp $(TREE)
SANITIZE := $(CXX) -std=c++20 -O1 -g -Wall -Wextra -Werror -Inative -fno-sanitize-recover=all
sanitize:  # what drafts are made and chosen with, under ASan, UBSan and TSan; needs g++ or clang++, no Python
	mkdir -p build/sanitize
	$(SANITIZE) -fsanitize=address,undefined tests/native/group_tree_stress.cpp $(TREE) -o build/sanitize/memory
	$(SANITIZE) -fsanitize=thread -pthread tests/native/group_tree_stress.cpp $(TREE) -o build/sanitize/threads
	$(SANITIZE) -fsanitize=address,undefined tests/native/draft_choice_stress.cpp native/tree/draft_choice.cpp -o build/sanitize/choice
	$(SANITIZE) -fsanitize=address,undefined -pthread $(STEPS) -o build/sanitize/steps_memory
	$(SANITIZE) -fsanitize=thread -pthread $(STEPS) -o build/sanitize/steps_threads
	build/sanitize/choice
	build/sanitize/memory
	build/sanitize/steps_memory
	$$(setarch -R true 2>/dev/null && echo setarch -R) build/sanitize/steps_threads
	$$(setarch -R true 2>/dev/null && echo setarch -R) build/sanitize/threads  # older TSans cannot bear much address randomization

SECONDS ?= 60
MINUTES ?= 120
SYSTEMS ?= replay vllm
SEED ?= 0
PLANS ?= 3
EXAMPLE ?= grpo
ONLY ?= virtual processes vllm
chaos: setup  # e.g. make chaos SECONDS=600 SEED=1000 ONLY=virtual; SECONDS are of each kind; bench/correctness/chaos.py has more kinds
	$(BIN)/python bench/correctness/chaos.py --seconds $(SECONDS) --seed $(SEED) --only $(ONLY)

long-run: setup  # two hours of rollouts under faults; what grows? e.g. make long-run MINUTES=20 SYSTEMS=replay
	OMP_WAIT_POLICY=passive $(BIN)/python bench/correctness/long_run.py --minutes $(MINUTES) --seed $(SEED) --systems $(SYSTEMS)

mutants: setup  # which deliberate faults in the code does no test notice? e.g. make mutants LISTS="tokens keys/any-role"
	$(BIN)/python bench/correctness/mutants.py $(if $(LISTS),--only $(LISTS))

kernel-test: setup  # the GPU's sampler without a GPU: Triton's interpreter and compiler, 1 GB kept out of the lock
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --require-hashes --target build/triton -r requirements/triton.lock
	PYTHONPATH=build/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/unit/test_cpu_kernels_triton.py tests/unit/test_sampling_triton.py tests/unit/test_paths_triton.py tests/e2e/test_runner_v2.py

VERL := build/verl-venv
$(VERL)/.installed: requirements/verl.lock requirements/torch-cpu.lock requirements/install_torchvision.py pyproject.toml CMakeLists.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --no-deps --no-compile -r requirements/torch-cpu.lock
	$(VERL)/bin/python -m pip install --quiet --no-deps --no-compile --require-hashes -r requirements/verl.lock
	$(VERL)/bin/python requirements/install_torchvision.py  # for models with images
	$(VERL)/bin/python -m pip install --quiet --no-deps --no-build-isolation -C build-dir=build/verl-native --editable .
	touch $@

verl-test: setup $(VERL)/.installed  # veRL's own trainer with Seer, on CPUs, in an environment of its own: 2 GB
	$(BIN)/python -m pytest tests/with_verl/runs.py tests/with_verl/image_runs.py $(PYTEST_ARGS)

# skyrl 0.3.0 needs it; a name that is there and does not run, as a shim, counts as absent.
PYTHON312 ?= $(shell python3.12 -c "import sys; print(sys.executable)" 2> /dev/null)
SKYRL := build/skyrl-venv
skyrl-test: setup  # SkyRL's generator, environments and worker with Seer, on CPUs, in an environment of its own: 5 GB
	test -n "$(PYTHON312)" || { echo "skyrl 0.3.0 needs Python 3.12: make skyrl-test PYTHON312=path/to/python3.12"; exit 1; }
	test -x $(SKYRL)/bin/python || $(PYTHON312) -m venv $(SKYRL)
	$(SKYRL)/bin/python -m pip install --quiet --no-deps --no-compile --require-hashes -r requirements/skyrl.lock
	$(BIN)/python tests/with_skyrl/run.py $(SKYRL)/bin/python $(PYTEST_ARGS)

slime-test: setup  # slime's data source, samples and rewards with Seer; not on PyPI: make slime-test SLIME=path/to/slime
	test -d "$(SLIME)/slime" || { echo "slime is not on PyPI: make slime-test SLIME=path/to/its/checkout"; exit 1; }
	$(BIN)/python tests/with_slime/run.py $(SLIME) $(PYTEST_ARGS)

compose-test: setup  # needs docker; docs/deployment.md says what else
	$(BIN)/python tests/deploy/run_compose.py

systemd-test: setup  # needs root, debootstrap and systemd-nspawn
	$(BIN)/python tests/deploy/run_systemd.py

slurm-test: setup  # needs root, and Debian's slurmctld, slurmd, slurm-client and munge
	$(BIN)/python tests/deploy/run_slurm.py

kubernetes-test: setup  # in the cluster that kubectl means; docs/deployment.md says what it needs
	$(BIN)/python tests/deploy/run_kubernetes.py

ray-test: setup  # seer.integrations.ray in a real Ray on this machine; 250 MB kept out of the environment
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --upgrade --target build/ray -r requirements/ray.lock
	PYTHONPATH=build/ray $(BIN)/python -m pytest tests/with_ray/runs.py $(PYTEST_ARGS)

CLIENTS := build/gateway-clients
gateway-test: setup  # unmodified clients against a real system; those that conflict with .venv have an environment of their own
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/gateway-clients.lock
	test -x $(CLIENTS)-agents/bin/python || $(PYTHON) -m venv $(CLIENTS)-agents
	$(CLIENTS)-agents/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/gateway-agents.lock
	test -x $(CLIENTS)-benchmarks/bin/python || $(PYTHON) -m venv $(CLIENTS)-benchmarks
	$(CLIENTS)-benchmarks/bin/python -m pip install --quiet --no-deps -r requirements/torch-cpu.lock
	$(CLIENTS)-benchmarks/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/gateway-benchmarks.lock
ifneq ($(PYTHON312),)
	test -x $(CLIENTS)-skyrl/bin/python || $(PYTHON312) -m venv $(CLIENTS)-skyrl
	$(CLIENTS)-skyrl/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/gateway-skyrl.lock
else
	@echo "SkyRL's client is skipped: it needs Python 3.12 (make gateway-test PYTHON312=path/to/python3.12)"
endif
	$(BIN)/python tests/gateway_clients/run.py $(CLIENTS)/bin/python $(CLIENTS)-agents/bin/python $(CLIENTS)-benchmarks/bin/python $(if $(PYTHON312),$(CLIENTS)-skyrl/bin/python)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  # pins what is installed in .venv now, with the hashes of the package index
	test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet uv==0.13.9; }
	$(BIN)/python requirements/lock.py

PYTHONS ?= python3.11 python3.12 python3.13
RELEASE := build/release
release:  # wheels that need no compiler, tried; the source; SBOMs; images with IMAGE=base@sha256:...; needs root
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/release.lock
	$(RELEASE)/bin/python requirements/release.py --pythons $(PYTHONS) $(if $(IMAGE),--image $(IMAGE) --docker-options="$(DOCKER_OPTIONS)")

clean:
	rm -rf $(VENV) build dist runs
