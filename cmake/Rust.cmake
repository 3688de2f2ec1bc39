# The Rust half of the text layer: cargo builds rust/switchyard_text into a static library, which CMake sees as
# switchyard::text_ffi. Without a cargo that is new enough, SWITCHYARD_WITH_TEXT=AUTO becomes OFF and ON is an error.
set(_sy_cargo_minimum 1.85)

function(_sy_find_cargo out_cargo out_version out_reason)
  # Debian's cargo-web package puts its newer toolchain beside the distribution's own; rustup's is in the home folder.
  set(candidates "")
  if(SWITCHYARD_CARGO)
    list(APPEND candidates "${SWITCHYARD_CARGO}")
  else()
    find_program(_sy_cargo_in_path cargo NO_CACHE)
    list(APPEND candidates "${_sy_cargo_in_path}" "$ENV{CARGO_HOME}/bin/cargo" "$ENV{HOME}/.cargo/bin/cargo"
      /usr/bin/cargo /usr/lib/rust-web/bin/cargo)
    file(GLOB versioned /usr/lib/rust-*/bin/cargo /usr/bin/cargo-1.* /usr/bin/cargo-web)
    list(APPEND candidates ${versioned})
  endif()
  set(reason "no cargo was found")
  foreach(cargo IN LISTS candidates)
    if(NOT EXISTS "${cargo}" OR IS_DIRECTORY "${cargo}")
      continue()
    endif()
    execute_process(COMMAND "${cargo}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND text MATCHES "cargo ([0-9]+\\.[0-9]+\\.[0-9]+)")
      if(CMAKE_MATCH_1 VERSION_GREATER_EQUAL _sy_cargo_minimum)
        set(${out_cargo} "${cargo}" PARENT_SCOPE)
        set(${out_version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
        return()
      endif()
      set(reason "${cargo} is ${CMAKE_MATCH_1}, but ${_sy_cargo_minimum} is needed")
    endif()
  endforeach()
  set(${out_cargo} "" PARENT_SCOPE)
  set(${out_reason} "${reason}" PARENT_SCOPE)
endfunction()

if(NOT SWITCHYARD_WITH_TEXT STREQUAL "OFF")
  set(SWITCHYARD_CARGO "" CACHE FILEPATH "The cargo to use; empty: search for one")
  _sy_find_cargo(_sy_cargo _sy_cargo_version _sy_cargo_reason)
  if(NOT _sy_cargo)
    if(SWITCHYARD_WITH_TEXT STREQUAL "ON")
      message(FATAL_ERROR "SWITCHYARD_WITH_TEXT=ON: ${_sy_cargo_reason}. Install cargo ${_sy_cargo_minimum} or newer "
        "(Debian 12: cargo-web), or set SWITCHYARD_CARGO.")
    endif()
    message(STATUS "Text layer: off, because ${_sy_cargo_reason}")
    set(SWITCHYARD_WITH_TEXT OFF)
  endif()
endif()

if(NOT SWITCHYARD_WITH_TEXT STREQUAL "OFF")
  message(STATUS "Text layer: cargo ${_sy_cargo_version}")
  set(_sy_crate "${PROJECT_SOURCE_DIR}/rust/switchyard_text")
  # The presets share one folder: the crate is the same for all of them and takes a minute or two.
  set(SWITCHYARD_RUST_TARGET_DIR "${PROJECT_BINARY_DIR}/rust" CACHE PATH "Where cargo builds the crate")
  set(_sy_rust_target "${SWITCHYARD_RUST_TARGET_DIR}")
  set(_sy_text_library "${_sy_rust_target}/release/libswitchyard_text.a")
  file(GLOB_RECURSE _sy_rust_sources CONFIGURE_DEPENDS "${_sy_crate}/src/*.rs")
  get_filename_component(_sy_cargo_bin "${_sy_cargo}" DIRECTORY)

  # Always a release build, and without the sanitizers of the C++ side: the tokenizer is no place to look for their
  # findings, and its debug build is fifty times slower. The C compiler is for the regular expressions (Oniguruma); the
  # same one for every preset, because another one makes cargo build it all again.
  find_program(_sy_rust_cc NAMES gcc-12 gcc cc NO_CACHE)
  if(NOT _sy_rust_cc)
    set(_sy_rust_cc "${CMAKE_C_COMPILER}")
  endif()
  add_custom_command(
    OUTPUT "${_sy_text_library}"
    COMMAND ${CMAKE_COMMAND} -E env "CARGO_TARGET_DIR=${_sy_rust_target}" "CC=${_sy_rust_cc}" --unset=CFLAGS
      "PATH=${_sy_cargo_bin}:$ENV{PATH}" "${_sy_cargo}" build --release --locked --quiet
    COMMAND ${CMAKE_COMMAND} -E touch "${_sy_text_library}"
    WORKING_DIRECTORY "${_sy_crate}"
    DEPENDS ${_sy_rust_sources} "${_sy_crate}/Cargo.toml" "${_sy_crate}/Cargo.lock"
    COMMENT "Building the tokenizer library with cargo"
    VERBATIM)
  add_custom_target(switchyard_text_cargo DEPENDS "${_sy_text_library}")

  find_package(Threads REQUIRED)
  add_library(switchyard_text_ffi STATIC IMPORTED GLOBAL)
  set_target_properties(switchyard_text_ffi PROPERTIES IMPORTED_LOCATION "${_sy_text_library}"
    INTERFACE_INCLUDE_DIRECTORIES "${_sy_crate}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m")
  add_dependencies(switchyard_text_ffi switchyard_text_cargo)
  add_library(switchyard::text_ffi ALIAS switchyard_text_ffi)
endif()
