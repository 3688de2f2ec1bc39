# switchyard::hwy: Google Highway 1.2 or newer, compiled from the sources that tools/setup unpacked.
#
# Debian 12 has 1.0.3, whose 8-bit and bf16 dot products are half as fast (docs/architecture.md, "Dependencies").
set(HIGHWAY_ROOT "" CACHE PATH "Highway source tree (has hwy/highway.h); default: the one that tools/setup prepared")
set(_hwy_cache "$ENV{SWITCHYARD_CACHE}")
if(NOT _hwy_cache)
  set(_hwy_cache "$ENV{HOME}/.cache/switchyard")
endif()
find_path(HIGHWAY_INCLUDE_DIR hwy/highway.h
  PATHS "${HIGHWAY_ROOT}" "${_hwy_cache}/highway-1.2.0" NO_DEFAULT_PATH)
if(NOT HIGHWAY_INCLUDE_DIR)
  message(FATAL_ERROR "Highway 1.2 was not found in '${HIGHWAY_ROOT}' or '${_hwy_cache}'. Run tools/setup, or pass "
                      "-DHIGHWAY_ROOT=<folder that holds hwy/highway.h>.")
endif()

add_library(switchyard_hwy STATIC
  ${HIGHWAY_INCLUDE_DIR}/hwy/abort.cc
  ${HIGHWAY_INCLUDE_DIR}/hwy/aligned_allocator.cc
  ${HIGHWAY_INCLUDE_DIR}/hwy/per_target.cc
  ${HIGHWAY_INCLUDE_DIR}/hwy/print.cc
  ${HIGHWAY_INCLUDE_DIR}/hwy/targets.cc
  ${HIGHWAY_INCLUDE_DIR}/hwy/timer.cc)
add_library(switchyard::hwy ALIAS switchyard_hwy)
target_include_directories(switchyard_hwy SYSTEM PUBLIC $<BUILD_INTERFACE:${HIGHWAY_INCLUDE_DIR}>)
target_compile_features(switchyard_hwy PUBLIC cxx_std_17)
# Targets: portable C (EMU128), AVX2, AVX-512, AVX-512 VNNI, Zen 4 and Sapphire Rapids. The SSE levels have no users
# here and cost compile time; EMU128 and the two last are off unless asked for.
#
# "fewer" keeps EMU128 and AVX2. The sanitizer builds use it: Clang 16 takes minutes for one kernel with AVX-512 and the
# address sanitizer, and a kernel is one source for all targets. The kernel tests put a guard page behind each buffer,
# so that the release builds find reads past the end on the other targets.
set(SWITCHYARD_KERNEL_TARGETS all CACHE STRING "Instruction sets that kernels are compiled for: all or fewer")
set_property(CACHE SWITCHYARD_KERNEL_TARGETS PROPERTY STRINGS all fewer)
set(_hwy_disabled HWY_SSE2 HWY_SSSE3 HWY_SSE4)
if(SWITCHYARD_KERNEL_TARGETS STREQUAL "fewer")
  list(APPEND _hwy_disabled HWY_AVX3 HWY_AVX3_DL HWY_AVX3_ZEN4 HWY_AVX3_SPR)
endif()
list(JOIN _hwy_disabled "|" _hwy_disabled)
target_compile_definitions(switchyard_hwy PUBLIC
  "HWY_DISABLED_TARGETS=(${_hwy_disabled})" HWY_BROKEN_EMU128=0 HWY_WANT_AVX3_DL=1)
find_package(Threads REQUIRED)
target_link_libraries(switchyard_hwy PUBLIC Threads::Threads)
