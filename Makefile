# Each target sets itself up: it needs Python 3.10 or later with its headers, a C++ compiler and make.
#
#   PYTHON=python3.12     the interpreter the environment is made with
#   VENV=/path/to/env     another environment; an existing one is used as it is, and a torch it has is kept
#   OUT=path              where `make bench` and `make gpu` put their figures
#   ARCH=aarch64          the processor that `make wheel` builds for; only one that this machine has is tried

PYTHON ?= python3
VENV ?= .venv
OUT ?= bench/results
ARCH ?= $(shell uname -m)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
SOURCES = $(wildcard csrc/*) setup.py pyproject.toml constraints.txt

.PHONY: quickstart test test-full extras mutants sanitize minimum newest bench gpu wheel notebooks docs clean

quickstart: $(VENV)/.fastdp
	$(VENV)/bin/fastdp quickstart

test: $(VENV)/.fastdp-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -q -rs -n 2

test-full: $(VENV)/.fastdp-test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -q -rs -m "slow or not slow" --timeout 7200 --hypothesis-profile=search
	$(MAKE) sanitize

# The tests of libraries that `make test` skips, in an environment of all extras.
EXTRAS = build/extras
extras: constraints.txt
	test -x $(EXTRAS)/bin/python || $(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e ".[test,pii]" bitsandbytes==0.50.2 nbclient==0.11.0 mkdocs==1.6.1 mkdocs-material==9.8.1
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(EXTRAS)/bin/python -m pytest -q -rs tests/methods/selective tests/engine/test_bases.py tests/test_doctests.py tests/test_notebooks.py tests/test_snippets.py

# Careless changes, one at a time: tests must fail for each (tests/mutants.yaml). It takes about half an hour on two cores.
mutants: $(VENV)/.fastdp-test
	$(VENV)/bin/python tests/mutants.py --json $(OUT)/mutants.json

# The extension under the address and undefined-behaviour sanitizers, in a copy of the sources: the tests of ops and CALLS
# random calls against float64, on each instruction set that this machine has. A report ends the process it is about.
# Left out are tests of the same calls: random ones, of lower instruction sets, through torch.compile; and one of memory.
SANITIZED = build/sanitized
CALLS ?= 5000
REPEATED = random_calls or lower_instruction_sets or compiled or registered_op or does_not_grow
SANITIZER = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1
RUNTIMES = $(foreach library,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))
UNDER = ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 LD_PRELOAD="$(RUNTIMES)" OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1
sanitize: $(VENV)/.fastdp-test
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r fastdp kernels bench csrc tests setup.py pyproject.toml README.md $(SANITIZED)
	$(PIP) install setuptools pybind11
	ln -s ../kernels ../bench $(SANITIZED)/fastdp # else an installed checkout's would be imported
	cd $(SANITIZED) && rm -f fastdp/_native*.so && sed -i s/-O3/-O1/ setup.py && CFLAGS="$(SANITIZER)" CXXFLAGS="$(SANITIZER)" $(abspath $(VENV))/bin/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && set -e; python=$(abspath $(VENV))/bin/python; first=0; for isa in portable avx2 avx512; do \
	export FASTDP_ISA=$$isa; if env $(UNDER) $$python -c "import fastdp._native as n; n.isa()"; then \
	env $(UNDER) $$python -m pytest -q -p no:cacheprovider --timeout 3600 tests/ops -k "not ($(REPEATED))"; \
	env $(UNDER) $$python -m fastdp.bench.fuzz_ops $(CALLS) --seed $$first --json fuzz-$$isa.json; \
	first=$$((first + $(CALLS))); fi; done; test $$first -gt 0

# Figures of the CPU, in $(OUT)/cpu, and the pictures drawn from them. Nothing else should run beside it.
bench: $(VENV)/.fastdp-test
	OMP_PROC_BIND=true $(VENV)/bin/fastdp bench step --json $(OUT)/cpu/step.json
	OMP_PROC_BIND=true $(VENV)/bin/fastdp bench kernels --json $(OUT)/cpu/kernels.json
	OMP_PROC_BIND=true $(VENV)/bin/fastdp bench planner --json $(OUT)/cpu/planner.json
	$(VENV)/bin/fastdp bench plot --results $(OUT)/cpu

# Figures of a GPU, in $(OUT)/gpu: 150 + 90 + 240 seconds at most, so 8 minutes. The first stage checks the engine,
# sums, norms and the rest in processes of their own, whose kernels compile at the same time. Each stage writes
# row by row and runs whatever became of the one before; a kernel that is wrong gets no speed. Fails if any stage did.
gpu: $(VENV)/.fastdp-test
	$(VENV)/bin/python -c "import torch, sys; sys.exit(None if torch.cuda.is_available() else 'make gpu needs a GPU')"
	failed=; \
	timeout 150 $(VENV)/bin/python -m bench.gpu_check --json $(OUT)/gpu/check.json || failed="$$failed check"; \
	timeout 90 $(VENV)/bin/fastdp bench kernels --no-compiled --json $(OUT)/gpu/kernels.json || failed="$$failed kernels"; \
	timeout 240 $(VENV)/bin/fastdp bench step --case gpu --json $(OUT)/gpu/step.json || failed="$$failed step"; \
	test -z "$$failed" || { echo "failed or out of time:$$failed"; exit 1; }

# A wheel for Linux that needs no compiler: built by zig's, against a C library of 2018, whatever this machine has; named by
# auditwheel, with a list of what it was made of; its tools are installed by hash; then installed and run where there is neither compiler nor source.
TOOLS = build/tools
TRIED = build/tried
CROSS = $(CURDIR)/$(TOOLS)/bin/python -m ziglang c++ -target $(ARCH)-linux-gnu.2.28
wheel: constraints.txt requirements-build.txt requirements-wheel.txt
	rm -rf build/wheel $(TRIED) dist/*_$(ARCH).whl
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install --require-hashes -r requirements-wheel.txt
	CC="$(CROSS)" CXX="$(CROSS)" LDSHARED="$(CROSS) -shared -s" LDCXXSHARED="$(CROSS) -shared -s" _PYTHON_HOST_PLATFORM=linux-$(ARCH) \
	SETUPTOOLS_EXT_SUFFIX=$$($(TOOLS)/bin/python -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))" | sed "s/$$(uname -m)/$(ARCH)/") \
	$(TOOLS)/bin/python setup.py -q build --build-base build/wheel bdist_wheel --dist-dir build/wheel/dist
	PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH $(TOOLS)/bin/python -m auditwheel repair --plat auto --wheel-dir dist build/wheel/dist/*.whl
	cd dist && sha256sum *.whl > SHA256SUMS
ifeq ($(ARCH),$(shell uname -m))
	$(PYTHON) -m venv $(TRIED)
	$(TRIED)/bin/python -m pip --disable-pip-version-check install --report build/wheel/torch.json $$(grep '^torch==' constraints.txt)
	grep -v '^torch==' constraints.txt > build/wheel/constraints.txt
	$(TRIED)/bin/python -m pip --disable-pip-version-check install --report build/wheel/rest.json -c build/wheel/constraints.txt dist/*manylinux*_$(ARCH).whl
	$(TOOLS)/bin/cyclonedx-py environment --of JSON -o dist/sbom.json $(TRIED)
	$(TOOLS)/bin/python tests/sbom.py dist/sbom.json build/wheel/torch.json build/wheel/rest.json
	mkdir $(TRIED)/elsewhere
	cd $(TRIED)/elsewhere && export PATH=$(CURDIR)/$(TRIED)/bin HF_HUB_OFFLINE=1 && python -I $(CURDIR)/tests/wheel.py && fastdp doctor && fastdp quickstart --records 256 && fastdp prove quickstart
	grep -q "$$(sha256sum dist/*manylinux*_$(ARCH).whl | cut -c-64)" $(TRIED)/elsewhere/runs/quickstart/epsilon-8/card.json
endif

# The tests of what touches other libraries, with the oldest of these that pyproject.toml allows.
OLDEST = build/oldest
minimum: constraints-minimum.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install -c constraints-minimum.txt -e ".[trainer]" torch pytest pytest-timeout hypothesis
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest -q tests/private tests/integrations/test_adapters.py tests/integrations/test_trainer.py tests/finetune tests/accounting

# The same with the newest of them, which constraints.txt may not know. Flower holds some back, so that federations are left out.
NEWEST = build/newest
newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install -e ".[trainer,trl,lightning,split]" pytest pytest-timeout hypothesis filelock
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(NEWEST)/bin/python -m pytest -q tests/test_cli.py tests/test_bad_input.py tests/private tests/integrations tests/finetune tests/accounting tests/honest

# The notebooks of examples/notebooks, run from top to bottom and saved with what they show; each in less than four minutes.
notebooks: $(VENV)/.fastdp-test
	$(PIP) install nbclient==0.11.0 nbformat==5.11.1 ipykernel==7.4.0
	HF_HUB_OFFLINE=1 $(VENV)/bin/python examples/notebooks/execute.py

# The site, in build/site; a broken link, or a page that is on no list, fails. It needs neither torch nor the extension.
docs:
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install mkdocs-material==9.8.1 mkdocs==1.6.1 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 ruff
	$(TOOLS)/bin/mkdocs build --quiet

clean:
	rm -rf build dist *.egg-info fastdp/_native*.so .venv

# torch comes first and alone: an index may offer a build for this machine that the constraints, read together with the
# requirements of everything else, would turn down. Then torch, and the triton that may have come with it, are held as they
# are, so that what the environment already had is not replaced.
HELD = import importlib.metadata as m; held = {d.name: d.version for d in m.distributions() if d.name in ("torch", "triton")}; \
	print(*(f"{n}=={held[n]}" if (n := line.split("==")[0]) in held else line for line in open("constraints.txt").read().splitlines()), sep="\n")
$(VENV)/.torch: constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -c "import torch" 2>/dev/null || $(PIP) install $$(grep '^torch==' constraints.txt)
	$(VENV)/bin/python -c '$(HELD)' > $(VENV)/constraints.txt
	touch $@

$(VENV)/.fastdp: $(VENV)/.torch $(SOURCES)
	$(PIP) install -c $(VENV)/constraints.txt -e .
	touch $@

$(VENV)/.fastdp-test: $(VENV)/.torch $(SOURCES)
	$(PIP) install -c $(VENV)/constraints.txt -e ".[test]"
	touch $@ $(VENV)/.fastdp
