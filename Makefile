# Short names for the presets (CMakePresets.json) and for tools/setup; everything else is CMake.
#
#   make run ARGS='-p "Hello" -n 32'   make test   make check   make bench   make install PREFIX=$HOME/.local

BUILD := build/release
PROGRAM := $(BUILD)/apps/cli/switchyard
ARGS ?= --raw -p "Once upon a time there was a" -n 64 --temp 0
PREFIX ?= /usr/local
EVERYTHING := SWITCHYARD_BUILD_TESTS SWITCHYARD_BUILD_BENCH SWITCHYARD_BUILD_FUZZ

# cargo of the user's own, for a shell that does not know it.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help run build test check bench install clean
.NOTPARALLEL:

help:
	@echo "make run      install what is missing, build, and generate text from the built-in model (ARGS=\"...\")"
	@echo "make build    build everything: program, tests, benchmarks, fuzz replay"
	@echo "make test     build everything and run every test"
	@echo "make check    format, layers, documentation, headers, lint"
	@echo "make bench    tokens per second of the built-in model beside this machine's limits (ARGS=\"...\")"
	@echo "make install  install program and library under PREFIX ($(PREFIX))"
	@echo "make clean    remove build/"
	@echo "One test: tools/t NAME. Other builds: cmake --list-presets. What CI does: .ci/run."

# The program alone: a machine that only runs needs no test libraries. A folder that was configured for tests stays so.
define configure_program
	@tools/setup run
	@test -e $(BUILD)/build.ninja || cmake --preset release $(EVERYTHING:%=-D%=OFF)
endef

define build_everything
	@tools/setup test
	@test -e $(BUILD)/build.ninja && grep -q SWITCHYARD_BUILD_TESTS:BOOL=ON $(BUILD)/CMakeCache.txt || \
	  cmake --preset release $(EVERYTHING:%=-D%=ON)
	@cmake --build --preset release
endef

run:
	$(configure_program)
	@cmake --build --preset release --target switchyard
	@$(PROGRAM) run $(ARGS)

build:
	$(build_everything)

test:
	$(build_everything)
	@tools/run_tests $(BUILD)

check:
	@tools/setup check
	@tools/check

bench: ARGS := $(if $(filter command line,$(origin ARGS)),$(ARGS))
bench:
	$(configure_program)
	@cmake --build --preset release --target switchyard
	@$(PROGRAM) bench $(ARGS)

install:
	$(configure_program)
	@cmake --build --preset release
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf build
