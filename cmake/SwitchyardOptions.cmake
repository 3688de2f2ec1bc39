# Compiler settings of our own code. Private to our targets: a user of the installed library sees none of them.
add_library(switchyard_options INTERFACE)
add_library(switchyard::options ALIAS switchyard_options)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

# No fast-math, and no contraction behind our backs: a multiply-add is one only where a kernel writes MulAdd.
target_compile_options(switchyard_options INTERFACE -Wall -Wextra -Wconversion -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of overlapping copies inside std::string where there are none (GCC bug 105651).
  target_compile_options(switchyard_options INTERFACE -Wno-restrict)
endif()
if(SWITCHYARD_WERROR)
  target_compile_options(switchyard_options INTERFACE -Werror)
endif()
if(CMAKE_BUILD_TYPE STREQUAL "Debug" OR SWITCHYARD_SANITIZE)
  target_compile_definitions(switchyard_options INTERFACE SY_ENABLE_DCHECK=1)
endif()

if(SWITCHYARD_SANITIZE)
  # On every target, ours or not: a sanitizer that sees half the program reports nonsense.
  add_compile_options(-fsanitize=${SWITCHYARD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SWITCHYARD_SANITIZE})
  add_compile_definitions(_GLIBCXX_ASSERTIONS)  # optionals, indices and fronts of what is empty
endif()
