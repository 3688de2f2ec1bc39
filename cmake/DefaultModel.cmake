# switchyard::default_model: the files of models/default inside the program, so that it runs without any path, installed
# or not. #include "default_model.h" gives DefaultModelFiles().
set(DEFAULT_MODEL_DIR "${PROJECT_SOURCE_DIR}/models/default")
set(_embed "${CMAKE_BINARY_DIR}/default_model/default_model.S")
configure_file("${DEFAULT_MODEL_DIR}/embed/default_model.S.in" "${_embed}" @ONLY)

add_library(switchyard_default_model STATIC "${DEFAULT_MODEL_DIR}/embed/default_model.cc" "${_embed}")
add_library(switchyard::default_model ALIAS switchyard_default_model)
target_compile_features(switchyard_default_model PUBLIC cxx_std_20)
target_include_directories(switchyard_default_model PUBLIC "${DEFAULT_MODEL_DIR}/embed")
target_link_libraries(switchyard_default_model PRIVATE switchyard::options)

# The assembler's .incbin is invisible to the dependency scanner.
set(_embedded config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json)
list(TRANSFORM _embedded PREPEND "${DEFAULT_MODEL_DIR}/")
set_source_files_properties("${_embed}" PROPERTIES OBJECT_DEPENDS "${_embedded}")
