# switchyard::text_ffi: the Rust library rust/switchyard_text, built by cargo as a static library.
#
# cargo runs only when one of the crate's files changed. The lock file is binding, the profile is always release, and
# everything is built inside the build tree. Sanitizers do not reach the Rust code; it links into sanitized programs.
find_program(CARGO_PROGRAM NAMES cargo HINTS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin" /usr/lib/cargo/bin
  DOC "cargo of Rust 1.85 or newer")
if(NOT CARGO_PROGRAM)
  message(FATAL_ERROR "cargo was not found. The tokenizer needs Rust 1.85 or newer: install rustup's toolchain or "
                      "Debian's cargo-web, or pass -DSWITCHYARD_WITH_TEXT=OFF for an engine without text.")
endif()

set(_crate "${PROJECT_SOURCE_DIR}/rust/switchyard_text")
set(_target_dir "${PROJECT_BINARY_DIR}/rust")
set(_archive "${_target_dir}/release/libswitchyard_text.a")
file(GLOB_RECURSE _sources CONFIGURE_DEPENDS "${_crate}/src/*.rs")
add_custom_command(
  OUTPUT "${_archive}"
  COMMAND ${CMAKE_COMMAND} -E env "CARGO_TARGET_DIR=${_target_dir}" "${CARGO_PROGRAM}" build --release --locked
          --quiet --manifest-path "${_crate}/Cargo.toml"
  # cargo leaves the archive alone if nothing in it changes; a new time stops Ninja from asking again.
  COMMAND ${CMAKE_COMMAND} -E touch "${_archive}"
  DEPENDS "${_crate}/Cargo.toml" "${_crate}/Cargo.lock" ${_sources}
  COMMENT "Building the Rust library switchyard_text"
  USES_TERMINAL
  VERBATIM)
add_custom_target(switchyard_text_ffi_build DEPENDS "${_archive}")

add_library(switchyard_text_ffi STATIC IMPORTED GLOBAL)
add_library(switchyard::text_ffi ALIAS switchyard_text_ffi)
add_dependencies(switchyard_text_ffi switchyard_text_ffi_build)
find_package(Threads REQUIRED)
set_target_properties(switchyard_text_ffi PROPERTIES
  IMPORTED_LOCATION "${_archive}"
  INTERFACE_INCLUDE_DIRECTORIES "${_crate}/include"
  INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m")
