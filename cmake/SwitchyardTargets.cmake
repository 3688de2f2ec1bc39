# sy_layer(<layer> SOURCES ... [USES layer ...] [LIBS target ...] [TABLES ...])
#
# One static library per layer, switchyard::<layer> with "/" written as "_". USES names the layers whose headers it
# may include (public and private); tools/check_layers.py proves from the include graph that nothing else is included.
function(sy_layer layer)
  cmake_parse_arguments(arg "" "" "SOURCES;USES;LIBS" ${ARGN})
  string(REPLACE "/" "_" name "${layer}")
  add_library(switchyard_${name} STATIC ${arg_SOURCES})
  add_library(switchyard::${name} ALIAS switchyard_${name})
  target_compile_features(switchyard_${name} PUBLIC cxx_std_20)
  target_include_directories(switchyard_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(switchyard_${name} PRIVATE $<BUILD_INTERFACE:switchyard::options> ${arg_LIBS})
  foreach(used IN LISTS arg_USES)
    string(REPLACE "/" "_" used "${used}")
    target_link_libraries(switchyard_${name} PUBLIC switchyard::${used})
  endforeach()
  sy_install_library(switchyard_${name} ${name})
endfunction()

# sy_install_library(<target> <name>): users of the installed package see it as switchyard::<name>.
function(sy_install_library target name)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS ${target} EXPORT switchyard
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)
endfunction()

# sy_table(<out-var> <table.def> <MACRO> <pattern> [<root>])
#
# Reads the lines MACRO(name[, second]) of a .def table and returns the source files that they stand for: <pattern> with
# every "@" replaced by the name and every "%" by the second argument, relative to <root> (default: this folder). A line whose file is missing stops the
# configuration and says which file it wants. This is what makes "one file, one line" true: the table is the only list.
function(sy_table out table macro pattern)
  set(root "${CMAKE_CURRENT_SOURCE_DIR}/${ARGV4}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${table}")
  file(STRINGS "${table}" lines REGEX "^${macro}\\(")
  set(files "")
  foreach(line IN LISTS lines)
    string(REGEX MATCH "^${macro}\\(([a-z0-9_]+)(, *([a-z0-9_]+))?" matched "${line}")
    set(name "${CMAKE_MATCH_1}")
    string(REPLACE "@" "${CMAKE_MATCH_1}" file "${pattern}")
    string(REPLACE "%" "${CMAKE_MATCH_3}" file "${file}")
    if(NOT EXISTS "${root}/${file}")
      message(FATAL_ERROR "${table} lists ${macro}(${name}), but there is no ${root}/${file}")
    endif()
    list(APPEND files "${file}")
  endforeach()
  set(${out} "${files}" PARENT_SCOPE)
endfunction()

# sy_test(<name> LAYER <layer> [LABELS label ...] [LIBS target ...] [SOURCES file ...] [TIMEOUT s])
#
# A GoogleTest program from <name>.cc. Labels: unit (default), isa, golden, e2e, slow, mpi, install.
function(sy_test name)
  cmake_parse_arguments(arg "" "LAYER;TIMEOUT" "LABELS;LIBS;SOURCES" ${ARGN})
  string(REPLACE "/" "_" layer "${arg_LAYER}")
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_executable(${name} ${name}.cc ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE SY_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE switchyard::options switchyard::${layer} ${arg_LIBS}
    switchyard_testing GTest::gtest)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
endfunction()

# sy_mpi_test(<name> LAYER <layer> RANKS n ... [LIBS target ...] [SOURCES file ...])
#
# A GoogleTest program from <name>.cc with a main of its own, which mpirun starts once for each number of ranks: the tests
# <name>_n<ranks>, label mpi. Without MPI one test <name> says that it is skipped.
function(sy_mpi_test name)
  cmake_parse_arguments(arg "" "LAYER" "RANKS;LIBS;SOURCES" ${ARGN})
  if(SWITCHYARD_WITH_MPI STREQUAL "OFF" OR NOT MPIEXEC_EXECUTABLE)
    add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: there is no MPI (libopenmpi-dev openmpi-bin)")
    set_tests_properties(${name} PROPERTIES LABELS mpi SKIP_REGULAR_EXPRESSION "skipped: there is no MPI")
    return()
  endif()
  string(REPLACE "/" "_" layer "${arg_LAYER}")
  add_executable(${name} ${name}.cc ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE switchyard::options switchyard::${layer} ${arg_LIBS} GTest::gtest)
  foreach(ranks IN LISTS arg_RANKS)
    sy_add_mpi_run(${name}_n${ranks} ${name} ${ranks})
  endforeach()
endfunction()

# sy_add_mpi_run(<test> <target> <ranks> [VARIABLE=value ...])
function(sy_add_mpi_run test target ranks)
  add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} ${SWITCHYARD_MPIEXEC_FLAGS} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
    $<TARGET_FILE:${target}>)
  sy_mpi_properties(${test} ${ranks} ${ARGN})
endfunction()

# sy_mpi_properties(<test> <ranks> [VARIABLE=value ...])
#
# Open MPI refuses to run as root, as containers do, unless told twice; and its ranks yield while they wait.
function(sy_mpi_properties test ranks)
  set_tests_properties(${test} PROPERTIES LABELS mpi PROCESSORS ${ranks} TIMEOUT 120 ENVIRONMENT
    "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_mpi_yield_when_idle=1;${ARGN}")
endfunction()

# sy_fuzz(<name> LAYER <layer>)
#
# A fuzz target from <name>.cc, which defines LLVMFuzzerTestOneInput. With Clang and SWITCHYARD_SANITIZE=fuzzer,... it links
# libFuzzer; otherwise a main() that replays the corpus (fuzz/corpus/<name>/), registered as a test with the label fuzz-replay.
function(sy_fuzz name)
  cmake_parse_arguments(arg "" "LAYER" "LIBS" ${ARGN})
  string(REPLACE "/" "_" layer "${arg_LAYER}")
  add_executable(${name} ${name}.cc)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE switchyard::options switchyard::${layer} ${arg_LIBS})
  if(SWITCHYARD_FUZZ_ENGINE)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(${name} PRIVATE replay_main.cc)
    if(SWITCHYARD_BUILD_TESTS)
      add_test(NAME ${name}_replay COMMAND ${name} "${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name}")
      set_tests_properties(${name}_replay PROPERTIES LABELS fuzz-replay TIMEOUT 120)
    endif()
  endif()
endfunction()
