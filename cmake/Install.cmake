# find_package(switchyard) for others: headers, libraries, and the package files that name them. docs/moe.md shows the use.
#
# switchyard::moe is the MoE library, C API included; switchyard::<layer> the single layers, for those who want less.
include(CMakePackageConfigHelpers)

sy_install_library(switchyard_hwy hwy)
add_library(switchyard_moe INTERFACE)
add_library(switchyard::moe ALIAS switchyard_moe)
target_link_libraries(switchyard_moe INTERFACE
  switchyard::moe_layer switchyard::moe_capi switchyard::moe_eplb switchyard::moe_oracle)
sy_install_library(switchyard_moe moe)

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/switchyard)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/switchyard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev)
install(EXPORT switchyard NAMESPACE switchyard:: DESTINATION ${_package_dir} FILE switchyard-targets.cmake COMPONENT dev)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/switchyard-config.cmake.in
  ${PROJECT_BINARY_DIR}/switchyard-config.cmake INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/switchyard-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/switchyard-config.cmake ${PROJECT_BINARY_DIR}/switchyard-config-version.cmake
  DESTINATION ${_package_dir} COMPONENT dev)
