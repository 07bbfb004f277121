# The front door. `make demo` and `make test` install what is missing, build, and run.
.DEFAULT_GOAL := help
PYTHON_ENV := $(CURDIR)/build/venv/bin/python

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z -]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 18

.PHONY: build
build: ## the release preset, into build/release: libraries in lib/, programs in bin/
	@tools/setup.sh build
	cmake --preset release -DSCAPE_BUILD_TESTS=OFF
	cmake --build --preset release

.PHONY: demo demo-net
demo: ## train a small GPT dense and sparse on two ranks; table and loss.png
demo-net: ## the same on four test hosts behind links of 1 Gbit/s, against wall-clock (root)
demo demo-net:
	@tools/setup.sh $@
	cmake --preset release -DSCAPE_BUILD_TESTS=OFF
	cmake --build --preset release --target scape_nccl scape_ucx scape_ofi scape-info
	$(PYTHON_ENV) examples/gpt/demo.py $(if $(filter demo-net,$@),--hosts 4 --rate 1gbit)

.PHONY: test
test: ## the whole test suite through ctest
	@tools/setup.sh test
	cmake --preset release -DSCAPE_BUILD_TESTS=ON
	cmake --build --preset release
	ctest --preset release

.PHONY: test-asan test-tsan
test-asan test-tsan: test-%: ## the test suite built with address and undefined-behaviour, or thread sanitizers
	@tools/setup.sh test
	cmake --preset $*
	cmake --build --preset $*
	ctest --preset $*

.PHONY: test-torch-cuda
test-torch-cuda: build ## the library beside PyTorch's CUDA wheel, without a GPU (takes 5 GB once)
	python3 tests/torch_wheel/check.py

.PHONY: test-arm
test-arm: ## unit tests built for 64-bit Arm and run in an emulator (adds the architecture arm64 to dpkg)
	@tools/setup.sh arm
	cmake --preset arm
	cmake --build --preset arm
	ctest --preset arm

.PHONY: fuzz
FUZZ_SECONDS ?= 20
fuzz: ## each fuzz target for FUZZ_SECONDS (20) under libFuzzer, with the sanitizers of test-asan
	@tools/setup.sh fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz
	tests/fuzz/fuzz.sh -s $(FUZZ_SECONDS)

.PHONY: format
format: ## clang-format every source file
	git ls-files '*.h' '*.cc' '*.c' | xargs clang-format -i

.PHONY: docs
docs: build ## write docs/settings.md from the registry of settings
	build/release/bin/scape-info --markdown > docs/settings.md

.PHONY: clean
clean: ## remove the build folder, the Python environment included
	rm -rf build
