# hwloc for core/numa.h: which CPUs and how much memory each NUMA node has. Without it SWITCHYARD_WITH_HWLOC=AUTO becomes
# OFF, and the same is read from /sys; ON is then an error.
if(NOT SWITCHYARD_WITH_HWLOC STREQUAL "OFF")
  find_package(PkgConfig QUIET)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(SY_HWLOC QUIET hwloc>=2.0)
  endif()
  if(NOT SY_HWLOC_FOUND)
    if(SWITCHYARD_WITH_HWLOC STREQUAL "ON")
      message(FATAL_ERROR "SWITCHYARD_WITH_HWLOC=ON: no hwloc 2 was found. Install libhwloc-dev and pkg-config "
        "(tools/setup test).")
    endif()
    message(STATUS "hwloc: off, because no hwloc 2 was found (Debian: libhwloc-dev); NUMA nodes are read from /sys")
    set(SWITCHYARD_WITH_HWLOC OFF)
  else()
    message(STATUS "hwloc: ${SY_HWLOC_VERSION}")
  endif()
endif()
